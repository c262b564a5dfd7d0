"""All contact with transformers: its registries, its loader, its names. Nothing outside imports it.

architectures   what is covered
loading         build a model without its experts, load the rest
conversion      which checkpoint tensors make up which expert, by transformers' own tables
hooks           our experts function in transformers' registry
forward         one sequence through the model
images, tokens, sampling   processors, tokenizers, logits processors
"""
