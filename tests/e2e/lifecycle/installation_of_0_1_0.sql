-- The database of version 0.1.0 (schema 0001) with two tenants, two keys, an adapter with two versions, and a release.
-- Made with this version's rules, 'alembic downgrade' to 0001, and limits as 0.1.0 wrote them.
BEGIN TRANSACTION;
CREATE TABLE adapter_versions (
	tenant_id VARCHAR(63) NOT NULL,
	name VARCHAR(63) NOT NULL,
	number INTEGER NOT NULL,
	digest VARCHAR(64) NOT NULL,
	state VARCHAR(16) NOT NULL,
	rank INTEGER NOT NULL,
	targets JSON NOT NULL,
	bytes BIGINT NOT NULL,
	report JSON NOT NULL,
	base_fingerprint VARCHAR(64) NOT NULL,
	pinned BOOLEAN NOT NULL,
	created_at DATETIME NOT NULL,
	PRIMARY KEY (tenant_id, name, number),
	FOREIGN KEY(tenant_id, name) REFERENCES adapters (tenant_id, name) ON DELETE CASCADE
);
INSERT INTO "adapter_versions" VALUES('acme','support',1,'@DIGEST-1@','ready',4,'["q_proj", "v_proj"]',5636,'{"modules_matched": 4, "modules_ignored": 0, "parameters": 896, "rank_by_module": {"model.layers.0.self_attn.q_proj": 4, "model.layers.0.self_attn.v_proj": 4, "model.layers.1.self_attn.q_proj": 4, "model.layers.1.self_attn.v_proj": 4}, "norm": {"total": 2.2644623220465756, "max": 1.5536448795586855, "max_module": "model.layers.1.self_attn.q_proj", "min": 0.7499312518167641}, "checks": [{"name": "config", "ok": true, "detail": "plain LoRA"}, {"name": "header", "ok": true, "detail": "8 tensors"}, {"name": "names", "ok": true, "detail": "4 modules of the base"}, {"name": "shapes", "ok": true, "detail": "rank 4"}, {"name": "coverage", "ok": true, "detail": "tensors came for every module that the config names"}, {"name": "values", "ok": true, "detail": "finite, and of effect"}, {"name": "base_name", "ok": true, "detail": "the config names this base"}], "reference_error": null}','@FINGERPRINT@',0,'2026-11-23 00:11:47.263000');
INSERT INTO "adapter_versions" VALUES('acme','support',2,'@DIGEST-2@','ready',4,'["q_proj", "v_proj"]',5636,'{"modules_matched": 4, "modules_ignored": 0, "parameters": 896, "rank_by_module": {"model.layers.0.self_attn.q_proj": 4, "model.layers.0.self_attn.v_proj": 4, "model.layers.1.self_attn.q_proj": 4, "model.layers.1.self_attn.v_proj": 4}, "norm": {"total": 2.2264318916811927, "max": 1.289163261755018, "max_module": "model.layers.0.self_attn.q_proj", "min": 0.9478843368046969}, "checks": [{"name": "config", "ok": true, "detail": "plain LoRA"}, {"name": "header", "ok": true, "detail": "8 tensors"}, {"name": "names", "ok": true, "detail": "4 modules of the base"}, {"name": "shapes", "ok": true, "detail": "rank 4"}, {"name": "coverage", "ok": true, "detail": "tensors came for every module that the config names"}, {"name": "values", "ok": true, "detail": "finite, and of effect"}, {"name": "base_name", "ok": true, "detail": "the config names this base"}], "reference_error": null}','@FINGERPRINT@',0,'2026-11-23 00:11:48.297000');
CREATE TABLE adapters (
	tenant_id VARCHAR(63) NOT NULL,
	name VARCHAR(63) NOT NULL,
	last_number INTEGER NOT NULL,
	created_at DATETIME NOT NULL,
	PRIMARY KEY (tenant_id, name),
	FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE CASCADE
);
INSERT INTO "adapters" VALUES('acme','support',2,'2026-11-23 00:11:47.263000');
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE "api_keys" (
	id VARCHAR(32) NOT NULL,
	tenant_id VARCHAR(63) NOT NULL,
	name VARCHAR(200),
	secret_hash VARCHAR(64) NOT NULL,
	previous_hash VARCHAR(64),
	previous_valid_until DATETIME,
	scopes JSON NOT NULL,
	models JSON,
	limits JSON NOT NULL,
	created_at DATETIME NOT NULL,
	expires_at DATETIME,
	revoked_at DATETIME,
	PRIMARY KEY (id),
	FOREIGN KEY(tenant_id) REFERENCES tenants (id) ON DELETE CASCADE
);
INSERT INTO "api_keys" VALUES('2a39b15c45e7e96c','acme','ci','268c9a2dd37ef99eaea38de913dd526146b9df96c74048f63720182a472a4dec',NULL,NULL,'["inference"]',NULL,'{"requests_per_minute": null, "tokens_per_minute": null, "max_concurrency": null, "max_output_tokens": null, "max_adapters": null, "max_adapter_bytes": null}','2026-11-23 00:11:47.027000',NULL,NULL);
INSERT INTO "api_keys" VALUES('a529b3d8dc27ba39','acme','old','4ea142f016b0b7bc52d42e8c431b12f7161890230aba288ab1f36c784a78cfa5',NULL,NULL,'["inference"]',NULL,'{"requests_per_minute": null, "tokens_per_minute": null, "max_concurrency": null, "max_output_tokens": null, "max_adapters": null, "max_adapter_bytes": null}','2026-11-23 00:11:47.120000',NULL,NULL);
CREATE TABLE "releases" (
	tenant_id VARCHAR(63) NOT NULL,
	name VARCHAR(63) NOT NULL,
	revision INTEGER NOT NULL,
	targets JSON NOT NULL,
	sticky VARCHAR(8) NOT NULL,
	created_at DATETIME NOT NULL,
	PRIMARY KEY (tenant_id, name, revision),
	FOREIGN KEY(tenant_id, name) REFERENCES adapters (tenant_id, name) ON DELETE CASCADE
);
INSERT INTO "releases" VALUES('acme','support',1,'[{"version": "v1", "weight": 100}]','none','2026-11-23 00:11:48.134000');
INSERT INTO "releases" VALUES('acme','support',2,'[{"version": "v1", "weight": 90}, {"version": "v2", "weight": 10}]','none','2026-11-23 00:11:48.321000');
CREATE TABLE tenants (
	id VARCHAR(63) NOT NULL,
	display_name VARCHAR(200),
	weight DOUBLE NOT NULL,
	limits JSON NOT NULL,
	created_at DATETIME NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "tenants" VALUES('acme','Acme Ltd',2.0,'{"requests_per_minute": 600, "tokens_per_minute": null, "max_concurrency": null, "max_output_tokens": null, "max_adapters": null, "max_adapter_bytes": null}','2026-11-23 00:11:46.834000');
INSERT INTO "tenants" VALUES('rival',NULL,1.0,'{"requests_per_minute": null, "tokens_per_minute": null, "max_concurrency": null, "max_output_tokens": null, "max_adapters": null, "max_adapter_bytes": null}','2026-11-23 00:11:46.975000');
CREATE INDEX ix_adapter_versions_digest ON adapter_versions (digest);
CREATE INDEX ix_api_keys_tenant_id ON api_keys (tenant_id);
COMMIT;
