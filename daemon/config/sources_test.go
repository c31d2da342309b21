package config

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// ownPorts returns a server whose GPUs own a sub-port for each plane and half, with separate sessions for IPv4 and
// IPv6.
func ownPorts(gpus, planes, halves int) string {
	var b strings.Builder
	b.WriteString("as: 65001\naccept: [10.255.0.0/16, \"fd00:ff::/64\"]\nloopbacks: [")
	for g := range gpus {
		fmt.Fprintf(&b, "10.255.0.%d/32, \"fd00:ff::%d/128\", ", g+1, g+1)
	}
	b.WriteString("]\nplanes:\n")
	for p := range planes {
		fmt.Fprintf(&b, "  - name: p%d\n    sub_ports:\n", p)
		for i := range gpus * halves {
			g := i/halves + 1
			fmt.Fprintf(&b, "      - device: e%dx%d\n        loopbacks: [10.255.0.%d/32, \"fd00:ff::%d/128\"]\n        sessions:\n", p, i, g, g)
			fmt.Fprintf(&b, "          - {peer: 10.%d.0.%d, local: 10.%d.0.%d}\n", p, 2*i, p, 2*i+1)
			fmt.Fprintf(&b, "          - {peer: \"fd00:%d::%x:1\", local: \"fd00:%d::%x:2\"}\n", p, i, p, i)
		}
	}
	return b.String()
}

// TestLargestServer has 8 GPUs with their own ports in 8 planes, Y-cables, and separate sessions for IPv4 and IPv6.
func TestLargestServer(t *testing.T) {
	c, err := Parse("largest", []byte(ownPorts(8, 8, 2)))
	if err != nil {
		t.Fatal(err)
	}
	groups := c.SourceGroups()
	if len(groups) != 8 {
		t.Fatalf("%d source groups of 8 GPUs", len(groups))
	}
	for g, group := range groups {
		var want []int
		for p := range 8 {
			want = append(want, 16*p+2*g, 16*p+2*g+1)
		}
		lo := []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.255.0.%d/32", g+1)), netip.MustParsePrefix(fmt.Sprintf("fd00:ff::%d/128", g+1))}
		if !slices.Equal(group.SubPorts, want) || !slices.Equal(group.Loopbacks, lo) {
			t.Errorf("source group %d is %v over %v, not %v over %v", g, group.Loopbacks, group.SubPorts, lo, want)
		}
	}
	again(t, c)
}

// TestUncarried checks that each loopback is named whose family no session of its sub-ports carries.
func TestUncarried(t *testing.T) {
	const head = "as: 65001\naccept: [10.255.0.0/16, \"fd00:ff::/64\"]\nloopbacks: [10.255.0.1/32, \"fd00:ff::1/128\", \"fd00:ff::2/128\"]\nplanes:\n  - name: p0\n    sub_ports:\n"
	for _, test := range []struct{ what, ports, want string }{
		{"IPv4 peers alone", "      - {device: e0, sessions: [{peer: 10.0.0.0}]}\n      - {device: e1, sessions: [{peer: 10.0.0.2}]}\n", "loopbacks[1]: fd00:ff::1/128: no session of its sub-ports carries ipv6\nloopbacks[2]: fd00:ff::2/128: no session of its sub-ports carries ipv6"},
		{"one IPv6 peer", "      - {device: e0, sessions: [{peer: 10.0.0.0}]}\n      - {device: e1, sessions: [{peer: \"fd01::1\"}, {peer: 10.0.0.2}]}\n", ""},
		{"IPv6 peers alone", "      - {device: e0, sessions: [{peer: \"fd01::1\"}]}\n", "loopbacks[0]: 10.255.0.1/32: no session of its sub-ports carries ipv4"},
		{"unnumbered", "      - {device: e0, sessions: [{unnumbered: true}]}\n", ""},
		{"unnumbered with one family", "      - {device: e0, sessions: [{unnumbered: true, families: [ipv6]}]}\n", "loopbacks[0]: 10.255.0.1/32: no session of its sub-ports carries ipv4"},
		{"each loopback has its own sub-port", "      - {device: e0, sessions: [{peer: 10.0.0.0}], loopbacks: [10.255.0.1/32]}\n" +
			"      - {device: e1, sessions: [{peer: \"fd01::1\"}], loopbacks: [\"fd00:ff::1/128\"]}\n      - {device: e2, sessions: [{unnumbered: true}], loopbacks: [\"fd00:ff::2/128\"]}\n", ""},
	} {
		c, err := Parse(test.what, []byte(head+test.ports))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, text := range c.Warnings() {
			sentence, _, _ := strings.Cut(text, ", so no other server")
			got = append(got, sentence)
		}
		if text := strings.Join(got, "\n"); text != test.want {
			t.Errorf("%s: %s, want %s", test.what, text, test.want)
		}
	}
}

// TestSessionLimit checks that a server has at most 512 sessions.
func TestSessionLimit(t *testing.T) {
	if _, err := Parse("full", []byte(ownPorts(8, 16, 2))); err != nil {
		t.Errorf("512 sessions: %v", err)
	}
	more := ownPorts(8, 16, 2) + "  - {name: more, sub_ports: [{device: more, sessions: [{peer: 10.99.0.0}]}]}\n"
	_, err := Parse("more", []byte(more))
	var errs Errors
	if !errors.As(err, &errs) || len(errs) != 1 || errs[0].Path != "planes[16].sub_ports[0].sessions[0]" ||
		errs[0].Wrong != "is session number 513" || errs[0].Right != "use at most 512 in total" {
		t.Errorf("513 sessions: %v", err)
	}
}

// TestSourceGroups checks that loopbacks that the same sub-ports serve are one group, regardless of their order.
func TestSourceGroups(t *testing.T) {
	const head = "as: 65001\naccept: [10.255.0.0/16]\nloopbacks: [10.255.0.1/32, 10.255.0.2/32, 10.255.0.3/32]\nplanes:\n"
	const port = "  - {name: p%d, sub_ports: [{device: e%d, %s sessions: [{peer: 10.0.%d.0}]}]}\n"
	for _, test := range []struct {
		name  string
		ports []string
		want  string
	}{
		{"nothing named", []string{"", ""}, "[{[10.255.0.1/32 10.255.0.2/32 10.255.0.3/32] [0 1]}]"},
		{"all named", []string{"loopbacks: [10.255.0.3/32, 10.255.0.2/32, 10.255.0.1/32],", ""}, "[{[10.255.0.1/32 10.255.0.2/32 10.255.0.3/32] [0 1]}]"},
		{"one apart", []string{"", "loopbacks: [10.255.0.2/32],"}, "[{[10.255.0.1/32 10.255.0.3/32] [0]} {[10.255.0.2/32] [0 1]}]"},
		{"overlap", []string{"loopbacks: [10.255.0.1/32, 10.255.0.2/32],", "loopbacks: [10.255.0.2/32, 10.255.0.3/32],"},
			"[{[10.255.0.1/32] [0]} {[10.255.0.2/32] [0 1]} {[10.255.0.3/32] [1]}]"},
	} {
		text := head
		for i, p := range test.ports {
			text += fmt.Sprintf(port, i, i, p, i)
		}
		c, err := Parse(test.name, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(c.SourceGroups()); got != test.want {
			t.Errorf("%s: %s, not %s", test.name, got, test.want)
		}
	}
}
