"""What launch.py does: start the processes of a cluster, watch them, replace those that die, and end them.

`restarts.py` and `liveness.py` decide, without processes and clocks; `process.py` starts and kills; `control.py` hears
signals and the children; `supervisor.py` brings it together; `table.py` says which processes there are and what the
loss of each one means; `show.py` is what a user sees.
"""
