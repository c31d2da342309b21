// Package netnstest gives each test separate network namespaces. The test makes, wires and
// populates them with processes, and its end removes them.
//
// Names are fared-<pid>-<n>, so that concurrent test processes do not collide. The two ends of a
// veth pair get different interface indexes from Veth, so that the kernel announces a lost
// carrier at once. They get equal indexes from NIC, so that the kernel announces it up to a second later, as for
// a physical device. Processes are started inside a namespace without
// `ip netns exec`, which would hide the cgroup and mount another sysfs. They are
// ended by their process id, and their output is shown when the test fails.
//
// Require is the only place that skips. With FARED_REQUIRE_ALL=1, which asserts that every
// tool is installed, it fails instead.
package netnstest
