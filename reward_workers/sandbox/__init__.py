"""Running programs that a policy wrote, confined, and without trust in anything they say.

From the bottom up: `wire` (plain values as bytes), `kernel` (system calls that Python lacks), `seccomp` and `landlock`
(what a confined process may ask of the kernel and of the file system), `confine` (a process gives up its rights),
`values` (what is not plain but Python's own), `candidate` and `checker` (a program's and the tests' side of the
conversation), `zygote` (forks confined processes), `session` (the conversation with one of them), `host` (starts zygotes),
`pool` (keeps them warm), `probes` (what this machine can enforce, found out by trying), `languages` (programs that are not
Python).
"""
