"""Adapters, their versions and releases.

`adapters.Catalog` admits and deletes versions. `releases.Releases` says what a bare adapter name means.
`resolver.Resolver` turns a request's `model` into the base or one version. `artifacts.Artifacts` is the only place that
deletes files of versions.
"""
