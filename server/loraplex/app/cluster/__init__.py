"""Engines whose processes, machines and number are Ray's. Nothing else in the repository imports ray, and of this
package only `manager`, `app` and `replica` do: never in the server's own process, which Ray would end with its head.

    server ─ ray_replicas.RayReplicas ─ManagerProcess─▶ manager ─ Ray Serve ─▶ RayEngine × N ─▶ engine process × N
       ▲──────────────────────────────── engine port ◀───────────────────────────┘
"""
