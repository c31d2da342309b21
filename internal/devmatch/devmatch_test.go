package devmatch

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/rdmadev/rdmadevtest"
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
		"rdma:mlx5_3":           "rdma:mlx5_3",
		"rdma:rocep59s0f0/2":    "rdma:rocep59s0f0/2",
		"name:eth[4-7]":         "name:eth[4-7]",
	} {
		if m, err := Parse(text); err != nil || m.String() != want || m.IsZero() {
			t.Errorf("%s: %v, %v", text, m, err)
		}
	}
	for text, want := range map[string]string{
		"":                            "no PCI address, MAC address, RDMA device or pattern; write pci:0000:3b:00.0, mac:",
		"eth0":                        "no PCI address, MAC address, RDMA device or pattern; write",
		"3b:00.0":                     "no PCI address, MAC address, RDMA device or pattern; write",
		"rdma:":                       "no RDMA device; write",
		"rdma:..":                     "no RDMA device; write",
		"rdma:mlx5_3/":                "no RDMA device; write",
		"rdma:mlx5_3/0":               "no RDMA device; write",
		"rdma:mlx5_3/1/2":             "no RDMA device; write",
		"name:":                       "no pattern of a name; write",
		"name:eth[":                   "no pattern of a name; write",
		"name:a/b":                    "no pattern of a name; write",
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

// sysfs is a root in which virtio0 is below 0000:00:03.0, and RDMA devices are: one at the function of a port, one with
// two ports, one whose function has representors, and one by software.
func sysfs(t *testing.T) string {
	root := t.TempDir()
	for path, content := range map[string]string{
		"class/infiniband/mlx5_0/ports/1/state":               "4: ACTIVE",
		"class/infiniband/mlx5_0/device/net/enp59s0f0np0/mtu": "1500",
		"class/infiniband/mlx4_0/ports/1/state":               "4: ACTIVE",
		"class/infiniband/mlx4_0/ports/2/state":               "4: ACTIVE",
		"class/infiniband/mlx4_0/device/net/two0/dev_port":    "0",
		"class/infiniband/mlx4_0/device/net/two1/dev_port":    "1",
		"class/net/two0/dev_port":                             "0",
		"class/net/two1/dev_port":                             "1",
		"class/infiniband/mlx5_2/ports/1/state":               "4: ACTIVE",
		"class/infiniband/mlx5_2/device/net/up0/mtu":          "1500",
		"class/infiniband/mlx5_2/device/net/rep0/mtu":         "1500",
		"class/infiniband/rxe0/ports/1/state":                 "4: ACTIVE",
		"class/infiniband/rxe0/parent":                        "veth0",
		"class/infiniband/mlx5_9/ports/1/state":               "1: DOWN", // its netdev is elsewhere
	} {
		rdmadevtest.Write(t, root, path, content)
	}
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
		"rdma:mlx5_0":             "enp59s0f0np0",
		"rdma:mlx4_0":             "rdma:mlx4_0 fits several devices: two0 (port p0), two1 (port p1); add the number of the port: rdma:mlx4_0/1",
		"rdma:mlx4_0/2":           "two1",
		"rdma:mlx5_2":             "up0",
		"rdma:rxe0":               "veth0",
		"rdma:mlx5_9":             "no device is that of rdma:mlx5_9",
		"rdma:mlx5_10":            "no device is that of rdma:mlx5_10",
		"name:enp*np1":            "enp59s0f1np1",
		"name:fabric*":            "no device has a name as name:fabric*",
		"name:two[0-9]":           "name:two[0-9] fits several devices: two0 (port p0), two1 (port p1); use a narrower pattern, and a sub-port for each device",
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
	want := map[string][3]string{
		"lo":           {"", "", ""},
		"enp59s0f0np0": {"pci:0000:3b:00.0", "mac:02:00:00:00:00:02", "rdma:mlx5_0"},
		"enp59s0f1np1": {"pci:0000:3b:00.1", "mac:02:00:00:00:00:03", ""},
		"two0":         {"pci:0000:5e:00.0/p0", "mac:02:00:00:00:00:04", "rdma:mlx4_0/1"},
		"two1":         {"pci:0000:5e:00.0/p1", "mac:02:00:00:00:00:05", "rdma:mlx4_0/2"},
		"up0":          {"pci:0000:86:00.0", "mac:02:00:00:00:00:06", "rdma:mlx5_2"},
		"virtio":       {"pci:0000:00:03.0", "mac:52:54:00:00:00:01", ""},
		"veth0":        {"", "mac:02:00:00:00:00:0b", "rdma:rxe0"},
		"sf0":          {"", "mac:02:00:00:00:00:0d", ""},
	}
	ports, err := rdmadev.Scan(root)
	if err != nil {
		t.Fatal(err)
	}
	for i := range machine {
		h := &machine[i]
		if w, ok := want[h.Name]; ok {
			if got := [3]string{ByPCI(root, h, machine).String(), ByMAC(h).String(), ByRDMA(ports, h).String()}; got != w {
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

// TestAssign checks that a device belongs to one sub-port.
func TestAssign(t *testing.T) {
	root := sysfs(t)
	var subPorts []SubPort
	want := []string{"enp59s0f0np0", "pci:0000:3b:00.0 selects enp59s0f0np0, which is the device of sub-port a too",
		"mac:02:00:00:00:00:04 selects two0, which is the device of sub-port two0 too", "two0", "none", "no device is that of rdma:mlx5_9"}
	for _, s := range [][2]string{{"a", "rdma:mlx5_0"}, {"fabric0", "pci:0000:3b:00.0"}, {"c", "mac:02:00:00:00:00:04"}, {"two0", ""}, {"absent", ""}, {"f", "rdma:mlx5_9"}} {
		m := Match{}
		if s[1] != "" {
			var err error
			if m, err = Parse(s[1]); err != nil {
				t.Fatal(err)
			}
		}
		subPorts = append(subPorts, SubPort{s[0], m})
	}
	for i, f := range Assign(root, subPorts, machine) {
		got := "none"
		switch {
		case f.Err != nil:
			got = f.Err.Error()
		case f.At >= 0:
			got = machine[f.At].Name
		}
		if got != want[i] || (f.Err != nil) && f.At != -1 {
			t.Errorf("%s: %s at %d, want %s", subPorts[i].Name, got, f.At, want[i])
		}
		if i == 1 && f.Holder != 1 { // so that the name is taken from it
			t.Errorf("the holder of fabric0 is %d", f.Holder)
		}
	}
}
