"""All contact with transformers: its registries, its loader, its names. Nothing outside imports it.

architectures   what is covered
loading         build a model without its experts, load the rest
conversion      which checkpoint tensors make up which expert, by transformers' own tables
hooks           our experts function in transformers' registry
forward         one sequence through the model
sequences       fixed rows through it, in steps that can be captured; graph_sequences captures them
kv_cache, attention, fused_attention, small_ops, small_mlps, small_routers, small_choice, sameness
                what such a step is made of
reference       the plain model, to compare with
visual, token_cut   what a model sees, and prompts that go on with fewer tokens
images, tokens, sampling   processors, tokenizers, logits processors
deepseek_vl2    a model that transformers does not have, from parts that it has
"""
