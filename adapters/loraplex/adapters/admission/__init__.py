"""Admission: from an adapter's two untrusted files to a validated specification, or a refusal with its reason.

`inspection.inspect_adapter` runs all checks. `spec.AdapterSpec` and `spec.BaseSpec` say what is known of an adapter
and of its base. `base_model.load_base_spec` reads the base's checkpoint without torch. `peft_config` and
`peft_support` hold what is served of PEFT. `inspection_cache.InspectionCache` remembers results.
"""
