"""Models: where they are, what is in their files, and how they are loaded, run and written.

Where and what: source, checkpoint, from_gguf, gguf_header, gguf_keys, hf_config, config_values,
read_config, identity. The dense architectures: family, targets, traits; one model of them:
dense_model, meta_model. Loading: config, load, stock, on_disk, tokenizer. Running: hooks, stream,
scoring, chat, sampling. Writing: save; modeling_dotmoe is the code of an export of format dotmoe.
"""
