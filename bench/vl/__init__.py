"""A small vision-language MoE of the Qwen3-VL architecture: its pictures, its questions, its training."""
