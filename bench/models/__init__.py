"""How the bundled model is made: corpus, tokenizer, mixture, training, evaluation, model card, publishing."""
