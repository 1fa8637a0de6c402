"""Models on meshes of devices: sharding rules, pipelines, several hosts."""
