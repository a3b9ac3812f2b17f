"""LoRA on the routed experts of a mixture: the forms in which it is saved, read into one."""
