"""Versions' own chat templates, which tenants write: rendered in a process that can be killed (`worker`), for which
`renderer.TemplateRenderer` asks."""
