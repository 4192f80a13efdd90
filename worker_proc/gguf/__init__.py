"""llama.cpp's model files: header, blocks of quantized weights, names and settings as Hugging Face has them, and a
model directory with a tokenizer for such a file. Only blocks need torch."""
