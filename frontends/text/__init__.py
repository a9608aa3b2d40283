"""Text and tokens: templates, tokenizer, detokenizer, stops, request models."""
