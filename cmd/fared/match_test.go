package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// renamed is a sub-port in the output of `fared planes -o json`.
type renamed struct {
	Device, Netdev, Reason string
	Carrier                bool
}

// TestMatchSurvivesRenaming runs two servers and a leaf. The file of the first server is that of `fared init --match
// mac`. Its devices swap their names while fared runs, which changes neither sessions nor weights nor the kernel's
// routes; a device that is made again under another name returns.
func TestMatchSurvivesRenaming(t *testing.T) {
	netnstest.Require(t)
	t.Setenv(clitest.AsFared, "1")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	server, leaf, other := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	dir := t.TempDir()
	socket := func(name string) string { return filepath.Join(dir, name+".sock") }
	file := func(name, text string) string {
		path := filepath.Join(dir, name+".yaml")
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cable := func(device string, k int) {
		netnstest.Veth(t, server, device, leaf, fmt.Sprint("a", k))
		server.IP("link", "set", device, "address", fmt.Sprintf("02:00:00:00:00:0%d", k))
		server.Addr(device, fmt.Sprintf("10.0.%d.1/31", k))
		leaf.Addr(fmt.Sprint("a", k), fmt.Sprintf("10.0.%d.0/31", k))
	}
	leafFile := "role: leaf\nrouter_id: 10.254.0.1\nas: 65100\naccept: [10.255.0.0/16]\nplanes:\n  - name: p0\n    sub_ports:\n"
	otherFile := "role: server\nrouter_id: 10.255.0.2\nas: 65002\nloopbacks: [10.255.0.2/32]\naccept: [10.255.0.0/16]\nplanes:\n  - name: p0\n    sub_ports:\n"
	for k := range 2 {
		cable(fmt.Sprint("eth", k), k)
		b := fmt.Sprint("b", k)
		netnstest.Veth(t, other, b, leaf, b)
		other.Addr(b, fmt.Sprintf("10.1.%d.1/31", k))
		leaf.Addr(b, fmt.Sprintf("10.1.%d.0/31", k))
		leafFile += fmt.Sprintf("      - {device: a%d, sessions: [{peer: 10.0.%[1]d.1, local: 10.0.%[1]d.0, passive: true}]}\n", k)
		leafFile += fmt.Sprintf("      - {device: b%d, sessions: [{peer: 10.1.%[1]d.1, local: 10.1.%[1]d.0, passive: true}]}\n", k)
		otherFile += fmt.Sprintf("      - {device: b%d, sessions: [{peer: 10.1.%[1]d.0}]}\n", k)
	}
	server.Addr("lo", "10.255.0.1/32")
	written, err := inNamespace(t, server, "init", "--match", "mac", "--planes", "1", "--leaf", "fared", "--output", "-")
	if err != nil || !strings.Contains(written, "      - device: p0s1 # now eth1, 10G by ethtool\n        match: mac:02:00:00:00:00:01\n") {
		t.Fatalf("%v\n%s", err, written)
	}
	checked, err := inNamespace(t, server, "check", "--host", "--config", file("server", written))
	if !strings.Contains(checked, "sub-port p0s0: device eth0 (mac:02:00:00:00:00:00)") || !strings.Contains(checked, "sub-port p0s1: device eth1 (mac:02:00:00:00:00:01)") {
		t.Fatalf("check --host: %v\n%s", err, checked)
	}
	pinned := strings.Replace(written, "match: mac:02:00:00:00:00:01", "match: mac:02:00:00:00:00:77", 1)
	checked, err = inNamespace(t, server, "check", "--host", "--config", file("absent", pinned))
	if !strings.Contains(checked, "sub-port p0s1: no device has the address mac:02:00:00:00:00:77") {
		t.Fatalf("check --host: %v\n%s", err, checked)
	}

	const memory = `dataplane: {address: "memory:"}`
	inside := fmt.Sprintf(`dataplane: {address: "inside:", flags: [--driver=linux, --socket=%s]}`, socket("agent"))
	run := func(n *netnstest.Namespace, kind, name, text, dataplane string) {
		n.Start(t, self, kind, "--config", file(name, text+dataplane+"\napi: {socket: "+socket(name)+"}\nslots: {}\n"))
	}
	run(leaf, "leaf", "leaf", leafFile, memory)
	run(other, "run", "other", otherFile, memory)
	run(server, "run", "server", written, inside)

	// state returns the sub-ports, the incarnations of the sessions, the weights, and the routes of the kernel.
	state := func() (map[string]renamed, string, error) {
		var planes struct {
			Planes []struct {
				SubPorts []renamed `json:"sub_ports"`
			}
		}
		var sessions struct {
			Sessions []struct {
				Name, State string
				Generation  uint64
			}
		}
		for command, into := range map[string]any{"planes": &planes, "sessions": &sessions} {
			out, err := inNamespace(t, server, command, "-o", "json", "--socket", socket("server"))
			if err == nil {
				err = json.Unmarshal([]byte(out), into)
			}
			if err != nil {
				return nil, "", err
			}
		}
		weights, err := inNamespace(t, server, "weights", "--socket", socket("server"))
		if err != nil {
			return nil, "", err
		}
		ports := map[string]renamed{}
		for _, p := range planes.Planes {
			for _, s := range p.SubPorts {
				ports[s.Device] = s
			}
		}
		routes := "" // without the names of devices
		for line := range strings.Lines(server.IP("-N", "route", "show", "proto", "179")) {
			before, _, _ := strings.Cut(line, " proto ")
			if !strings.HasPrefix(line, "\t") {
				routes += before + "\n"
			}
		}
		table := "" // without PROVED: probes go on
		for line := range strings.Lines(weights) {
			table += fmt.Sprintf("%q in effect: %v\n", strings.Fields(line)[:3], strings.Contains(line, "in effect"))
		}
		return ports, fmt.Sprintf("%+v\n%s%s", sessions.Sessions, table, routes), nil
	}
	// until waits until the sub-ports have these devices, and both carry packets. It returns the rest of the state.
	until := func(first, second string) (rest string) {
		t.Helper()
		netnstest.Eventually(t, time.Minute, func() error {
			ports, all, err := state()
			if err != nil {
				return err
			}
			rest = all
			if ports["p0s0"] != (renamed{"p0s0", first, "", true}) || ports["p0s1"] != (renamed{"p0s1", second, "", true}) {
				return fmt.Errorf("%+v", ports)
			}
			// The three parts of the state are read one after another, so that all have to be complete.
			if !strings.Contains(all, "in effect: true") || !strings.Contains(all, `"20G"`) || !strings.Contains(all, " nhid ") || strings.Count(all, "State:established") != 2 {
				return fmt.Errorf("%s", all)
			}
			for _, device := range []string{first, second} {
				if nexthops := server.IP("nexthop"); !strings.Contains(nexthops, "dev "+device+" ") {
					return fmt.Errorf("no nexthop over %s:\n%s", device, nexthops)
				}
			}
			return nil
		})
		return rest
	}
	before := until("eth0", "eth1")
	server.IP("link", "set", "eth0", "name", "tmp0")
	server.IP("link", "set", "eth1", "name", "eth0")
	server.IP("link", "set", "tmp0", "name", "eth1")
	if after := until("eth1", "eth0"); after != before {
		t.Errorf("after renaming:\n%s\nbefore:\n%s", after, before)
	}
	if out, err := inNamespace(t, server, "planes", "--socket", socket("server")); err != nil || !strings.Contains(out, "p0s0 (eth1)") {
		t.Errorf("%v\n%s", err, out)
	}
	server.IP("link", "del", "eth1")
	cable("new0", 0)
	until("new0", "eth0")
}
