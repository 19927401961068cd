"""Protocol between a leader and its workers and frontends: joining (`join`), and the messages over their world (`message`, `channel`,
`inputs`)."""
