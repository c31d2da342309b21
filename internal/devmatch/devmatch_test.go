package devmatch

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/internal/rtnl"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"pci:0000:3b:00.0":      "pci:0000:3b:00.0",
		"pci:0000:3B:1F.7":      "pci:0000:3b:1f.7",
		"pci:10000:01:00.1":     "pci:10000:01:00.1", // a domain of VMD
		"pci:0000:3b:00.0/p1":   "pci:0000:3b:00.0/p1",
		"mac:02:00:00:00:00:aF": "mac:02:00:00:00:00:af",
		"mac:0200.0000.00af":    "mac:02:00:00:00:00:af",
	} {
		if m, err := Parse(text); err != nil || m.String() != want || m.IsZero() {
			t.Errorf("%s: %v, %v", text, m, err)
		}
	}
	for text, want := range map[string]string{
		"":                            "neither a PCI nor a MAC address; write pci:0000:3b:00.0 or mac:",
		"eth0":                        "neither a PCI nor a MAC address; write",
		"3b:00.0":                     "neither a PCI nor a MAC address; write",
		"pci:3b:00.0":                 "no PCI domain; write pci:0000:3b:00.0;",
		"pci:3b:00.0/p1":              "no PCI domain; write pci:0000:3b:00.0/p1;",
		"pci:0000:3b:00.8":            "no PCI address",
		"pci:0000:3b:20.0":            "no PCI address",
		"pci:0000:3b:00":              "no PCI address",
		"pci:0000:3b:00.0/":           "no name of a port",
		"pci:0000:3b:00.0/a/b":        "no name of a port",
		"mac:02:00:00:00:00":          "no MAC address of 6 bytes",
		"mac:02:00:00:00:00:00:00:01": "no MAC address of 6 bytes",
		"mac:01:00:5e:00:00:01":       "the address of no device",
		"mac:00:00:00:00:00:00":       "the address of no device",
	} {
		m, err := Parse(text)
		var format *FormatError
		if !errors.As(err, &format) || !strings.Contains(format.Reason+"; "+format.Remedy, want) || !m.IsZero() {
			t.Errorf("%q: %v, %v; want %s", text, m, err, want)
		}
	}
}

// machine has a NIC with one function per port, a NIC with two ports at one function, a NIC whose switch has
// representors, a virtio device, a bridge and VLANs with adopted addresses, and a veth.
var machine = []rtnl.Hardware{
	{Index: 1, Name: "lo", Address: "00:00:00:00:00:00"},
	{Index: 2, Name: "enp59s0f0np0", AltNames: "fabric0", Bus: "pci", Parent: "0000:3b:00.0", Port: "p0", Address: "02:00:00:00:00:02", Permanent: "02:00:00:00:00:02"},
	{Index: 3, Name: "enp59s0f1np1", Bus: "pci", Parent: "0000:3b:00.1", Port: "p1", Address: "02:00:00:00:00:02", Permanent: "02:00:00:00:00:03"}, // as in a bond
	{Index: 4, Name: "two0", Bus: "pci", Parent: "0000:5e:00.0", Port: "p0", Address: "02:00:00:00:00:04", Permanent: "02:00:00:00:00:04"},
	{Index: 5, Name: "two1", Bus: "pci", Parent: "0000:5e:00.0", Port: "p1", Address: "02:00:00:00:00:05", Permanent: "02:00:00:00:00:05"},
	{Index: 6, Name: "up0", Bus: "pci", Parent: "0000:86:00.0", Port: "p0", Permanent: "02:00:00:00:00:06"},
	{Index: 7, Name: "rep0", Bus: "pci", Parent: "0000:86:00.0", Port: "pf0vf0"},
	{Index: 8, Name: "rep1", Bus: "pci", Parent: "0000:86:00.0", Port: "c1pf0sf88"},
	{Index: 9, Name: "virtio", Bus: "virtio", Parent: "virtio0", Address: "52:54:00:00:00:01"},
	{Index: 10, Name: "br0", Address: "02:00:00:00:00:04"},
	{Index: 11, Name: "veth0", Address: "02:00:00:00:00:0b"},
	{Index: 12, Name: "veth0.7", Address: "02:00:00:00:00:0b"},
	{Index: 13, Name: "sf0", Bus: "auxiliary", Parent: "mlx5_core.sf.2", Address: "02:00:00:00:00:0d"},
}

// sysfs is a root in which virtio0 is below 0000:00:03.0.
func sysfs(t *testing.T) string {
	root := t.TempDir()
	device := filepath.Join(root, "devices/pci0000:00/0000:00:03.0/virtio0")
	bus := filepath.Join(root, "bus/virtio/devices")
	if err := errors.Join(os.MkdirAll(device, 0o755), os.MkdirAll(bus, 0o755), os.Symlink(device, filepath.Join(bus, "virtio0"))); err != nil {
		t.Fatal(err)
	}
	return root
}

func TestFind(t *testing.T) {
	root := sysfs(t)
	for text, want := range map[string]string{
		"pci:0000:3b:00.0":        "enp59s0f0np0",
		"pci:0000:3b:00.1/p1":     "enp59s0f1np1",
		"pci:0000:3b:00.1/p0":     "no device is at pci:0000:3b:00.1/p0",
		"pci:0000:5e:00.0":        "pci:0000:5e:00.0 fits several devices: two0 (port p0), two1 (port p1); add the port: pci:0000:5e:00.0/p0",
		"pci:0000:5e:00.0/p1":     "two1",
		"pci:0000:86:00.0":        "up0",
		"pci:0000:86:00.0/pf0vf0": "rep0",
		"pci:0000:00:03.0":        "virtio",
		"pci:0000:00:04.0":        "no device is at pci:0000:00:04.0",
		"mac:02:00:00:00:00:02":   "enp59s0f0np0",
		"mac:02:00:00:00:00:03":   "enp59s0f1np1",
		"mac:02:00:00:00:00:04":   "two0", // and not the bridge that has adopted it
		"mac:02:00:00:00:00:0b":   "mac:02:00:00:00:00:0b fits several devices: veth0, veth0.7; use a match that only one device has",
		"mac:52:54:00:00:00:01":   "virtio",
		"mac:02:00:00:00:00:ff":   "no device has the address mac:02:00:00:00:00:ff",
	} {
		m, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		at, err := m.Find(root, machine)
		got := ""
		var not *NotOneError
		switch {
		case err == nil:
			got = machine[at].Name
		case errors.As(err, &not) && at == -1:
			got = not.Reason + "; " + not.Remedy
		}
		if got != want && !strings.HasPrefix(got, want+";") && !strings.HasPrefix(got, want+":") {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// TestOf checks the matches that are written for devices: each selects its device, or is none.
func TestOf(t *testing.T) {
	root := sysfs(t)
	want := map[string][2]string{
		"lo":           {"", ""},
		"enp59s0f0np0": {"pci:0000:3b:00.0", "mac:02:00:00:00:00:02"},
		"enp59s0f1np1": {"pci:0000:3b:00.1", "mac:02:00:00:00:00:03"},
		"two0":         {"pci:0000:5e:00.0/p0", "mac:02:00:00:00:00:04"},
		"two1":         {"pci:0000:5e:00.0/p1", "mac:02:00:00:00:00:05"},
		"up0":          {"pci:0000:86:00.0", "mac:02:00:00:00:00:06"},
		"virtio":       {"pci:0000:00:03.0", "mac:52:54:00:00:00:01"},
		"sf0":          {"", "mac:02:00:00:00:00:0d"},
	}
	for i := range machine {
		h := &machine[i]
		if w, ok := want[h.Name]; ok {
			if got := [2]string{ByPCI(root, h, machine).String(), ByMAC(h).String()}; got != w {
				t.Errorf("%s: %q, want %q", h.Name, got, w)
			}
		}
	}
}

func TestFor(t *testing.T) {
	root := sysfs(t)
	for _, tc := range []struct {
		match, name string
		at, holder  int
		fault       string
	}{
		{"pci:0000:3b:00.0", "p0s0", 1, -1, ""},
		{"pci:0000:3b:00.0", "fabric0", 1, 1, ""},
		{"pci:0000:3b:00.1", "fabric0", 2, 1, ""}, // the name moves
		{"pci:0000:5e:00.0", "two1", 4, 4, ""},    // has the name, so that the second port changes nothing
		{"pci:0000:3b:00.1", "two1", -1, 4, "two1 is the name of another device than pci:0000:3b:00.1, which is enp59s0f1np1"},
		{"pci:0000:00:04.0", "two1", -1, 4, "no device is at pci:0000:00:04.0"},
	} {
		m, err := Parse(tc.match)
		if err != nil {
			t.Fatal(err)
		}
		at, holder, err := m.For(root, tc.name, machine)
		fault := ""
		if err != nil {
			fault = err.Error()
		}
		if at != tc.at || holder != tc.holder || fault != tc.fault {
			t.Errorf("%s for %s: %d, %d, %q, want %+v", tc.match, tc.name, at, holder, fault, tc)
		}
	}
}
