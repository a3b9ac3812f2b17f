"""Engine processes: started, watched, and started again.

`supervisor.EngineProcess` is one life of one, `supervisor.RestartPolicy` says how soon the next may begin.
`watchdog.Watchdog` decides when a process that does not answer is dead. `child.Child` is a process that is always
waited for.
"""
