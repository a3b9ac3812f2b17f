"""The fields of an adapter_config.json that name modules: lists of names, patterns, and expressions."""
