"""Request and response models of the admin plane, one module a resource.

`fields` has the base classes `RequestBody`, `QueryParameters` and `ResponseBody` and the field types; `limits`,
`tenants`, `keys`, `adapters`, `releases`, `usage`, `engine` and `audit` have the models. `described` holds the JSON
Schema of rules that a type cannot say. Unknown fields are refused; times are RFC 3339 in UTC.
"""
