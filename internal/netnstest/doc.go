// Package netnstest gives tests network namespaces of their own: made, wired and
// populated with processes by the test, and gone with it.
//
// Names are fared-<pid>-<n>, so several test processes do not meet. The two ends of a
// veth pair get different interface indexes, because equal ones delay the news of a
// lost carrier by up to a second. Processes are started inside a namespace without
// `ip netns exec`, which would hide the cgroup and mount a sysfs of its own; they are
// ended by their process id, and what they wrote is shown when the test fails.
//
// Require is the only place that skips, and it fails instead where FARED_REQUIRE_ALL=1
// says that everything a test may ask for is installed.
package netnstest
