package link

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/devmatch"
	"github.com/fared/fared/internal/rtnl"
)

func TestParsePCIe(t *testing.T) {
	for _, tc := range []struct {
		speed, width string
		want         fare.Bandwidth
		wrong        string
	}{
		{speed: "2.5 GT/s PCIe\n", width: "1\n", want: 2e9},
		{speed: "5.0 GT/s PCIe", width: "4", want: 16e9},
		{speed: "5 GT/s", width: "x8", want: 32e9},
		{speed: "8.0 GT/s PCIe", width: "8", want: 63_015_384_615}, // kernel: 63.008 Gb/s, computed from whole Mb/s per lane
		{speed: "16.0 GT/s PCIe\n", width: "16\n", want: 252_061_538_461},
		{speed: "32.0 GT/s PCIe", width: "16", want: 504_123_076_923},
		{speed: "64.0 GT/s PCIe", width: "16", want: 968e9},
		{speed: "64.0 GT/s PCIe", width: "32", want: 1_936e9},
		{speed: "Unknown", width: "0", wrong: "not a number of GT/s"},
		{speed: "", width: "16", wrong: "not a number of GT/s"},
		{speed: "12.0 GT/s PCIe", width: "16", wrong: "not the rate of a known generation"},
		{speed: "16.0 GB/s", width: "16", wrong: "not a number of GT/s"},
		{speed: "16.0 GT/s PCIe", width: "0", wrong: "not 1 to 32 lanes"},
		{speed: "16.0 GT/s PCIe", width: "255", wrong: "not 1 to 32 lanes"},
		{speed: "16.0 GT/s PCIe", width: "", wrong: "not 1 to 32 lanes"},
		{speed: "16.0 GT/s PCIe", width: "-1", wrong: "not 1 to 32 lanes"},
	} {
		t.Run(strings.TrimSpace(tc.speed)+" x"+strings.TrimSpace(tc.width), func(t *testing.T) {
			got, err := ParsePCIe(tc.speed, tc.width)
			if tc.wrong == "" && (err != nil || got != tc.want) {
				t.Errorf("got %d, %v, want %d", got, err, tc.want)
			}
			if tc.wrong != "" && (err == nil || !strings.Contains(err.Error(), tc.wrong) || got != 0) {
				t.Errorf("got %d, %v, want an error with %q", got, err, tc.wrong)
			}
		})
	}
}

// fakeSysfs returns a sysfs with a root port with an endpoint that has two functions and a CXL memory device below it,
// a virtual function, a switch whose link is down, and devices that are not on PCIe.
func fakeSysfs(t *testing.T) string {
	t.Helper()
	sysfs := t.TempDir()
	write := func(dir, speed, width string) {
		t.Helper()
		dir = filepath.Join(sysfs, "devices", dir)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, text := range map[string]string{"current_link_speed": speed, "current_link_width": width} {
			if text == "" {
				continue
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	link := func(name, dir string) {
		t.Helper()
		name = filepath.Join(sysfs, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		up, err := filepath.Rel(filepath.Dir(name), filepath.Join(sysfs, "devices", dir))
		if err == nil {
			err = os.Symlink(up, name)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	const port = "pci0000:3a/0000:3a:00.0/"
	write(port, "32.0 GT/s PCIe", "16")
	write(port+"0000:3b:00.0", "32.0 GT/s PCIe", "8")
	write(port+"0000:3b:00.0/mem0", "", "")
	write(port+"0000:3b:00.0/mlx5_core.sf.4", "", "")
	write(port+"0000:3b:00.1", "Unknown", "0")
	write("pci0000:3a/0000:3a:01.0/0000:3c:00.0", "Unknown", "0")
	write("pci0000:3a/0000:3a:02.0", "16.0 GT/s PCIe", "") // no width
	write("pci0000:00/0000:00:02.0", "2.5 GT/s PCIe", "1")
	write("pci0000:00/0000:00:02.0/virtio2", "", "")
	write("platform/soc/nupa", "", "")
	write(port+"0000:3b:00.0/nupa/port0", "", "")
	for _, pci := range []string{port + "0000:3b:00.0", port + "0000:3b:00.1", "pci0000:3a/0000:3a:01.0/0000:3c:00.0", "pci0000:3a/0000:3a:02.0"} {
		link("bus/pci/devices/"+filepath.Base(pci), pci)
	}
	link("bus/cxl/devices/mem0", port+"0000:3b:00.0/mem0")
	link("bus/auxiliary/devices/mlx5_core.sf.4", port+"0000:3b:00.0/mlx5_core.sf.4")
	link("bus/virtio/devices/virtio2", "pci0000:00/0000:00:02.0/virtio2")
	link("bus/platform/devices/nupa", "platform/soc/nupa")
	write(port+"0000:3b:00.0/nupa/port0/net/nupa0", "", "")
	link("class/net/nupa0", port+"0000:3b:00.0/nupa/port0/net/nupa0")
	link("devices/"+port+"0000:3b:00.0/nupa/port0/net/nupa0/device", port+"0000:3b:00.0/nupa/port0")
	return sysfs
}

func TestPCIeSpeedReadsSysfs(t *testing.T) {
	const x8, x16 = fare.Bandwidth(252_061_538_461), fare.Bandwidth(504_123_076_923)
	sysfs := fakeSysfs(t)
	for _, tc := range []struct {
		name        string
		bus, parent string
		device      string
		netns       string
		want        fare.Bandwidth
		wrong       string // error of pcieSpeed; "no device" if there is no device to read
	}{
		{name: "function", bus: "pci", parent: "0000:3b:00.0", want: x8},
		{name: "function, from another namespace", bus: "pci", parent: "0000:3b:00.0", netns: "gpu0", want: x8},
		{name: "virtual function: the port's end of the link", bus: "pci", parent: "0000:3b:00.1", want: x16},
		{name: "CXL memory device", bus: "cxl", parent: "mem0", want: x8},
		{name: "sub-function", bus: "auxiliary", parent: "mlx5_core.sf.4", want: x8},
		{name: "child of no bus", device: "nupa0", parent: "port0", want: x8},
		{name: "child of no bus in another namespace", device: "nupa0", netns: "gpu0", wrong: "no device"},
		{name: "paravirtual", bus: "virtio", parent: "virtio2", wrong: "no device"},
		{name: "link down", bus: "pci", parent: "0000:3c:00.0", wrong: "not a number of GT/s"},
		{name: "no width", bus: "pci", parent: "0000:3a:02.0", wrong: "current_link_width"},
		{name: "not on PCIe", bus: "platform", parent: "nupa", wrong: "neither the device nor any of its parents has a PCIe link"},
		{name: "gone", bus: "pci", parent: "0000:99:00.0", wrong: "no such file"},
		{name: "virtual device", device: "dummy0", wrong: "no such file"},
		{name: "a name that climbs", bus: "..", parent: "../../devices/pci0000:3a/0000:3a:00.0", wrong: "no such file"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := linkMessage{name: tc.device, parentBus: tc.bus, parent: tc.parent}
			device := parentDevice(sysfs, &l, tc.netns == "")
			if device == "" {
				if tc.wrong != "no device" {
					t.Error("no device to ask")
				}
				return
			}
			got, err := pcieSpeed(sysfs, device)
			if got != tc.want || (err != nil) != (tc.wrong != "") || err != nil && !strings.Contains(err.Error(), tc.wrong) {
				t.Errorf("got %d, %v, want %d, %q", got, err, tc.want, tc.wrong)
			}
		})
	}
}

// attr returns one attribute.
func attr(kind uint16, v ...byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(v)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, v...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

func u32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
func u64(v uint64) []byte { return binary.NativeEndian.AppendUint64(nil, v) }

func join(parts ...[]byte) (b []byte) {
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

func TestLinkMessage(t *testing.T) {
	const upAll = unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_LOWER_UP
	for _, tc := range []struct {
		name   string
		flags  uint32
		oper   byte
		reason string
	}{
		{"up", upAll, operUp, ""},
		{"loopback says unknown", upAll, operUnknown, ""},
		{"set down", unix.IFF_LOWER_UP, operUp, "administratively down"},
		{"cable out", unix.IFF_UP, 2, "no carrier"},
		{"far end of a veth down", unix.IFF_UP, 3, "no carrier"},
		{"802.1X", upAll, 5, "operational state dormant"},
		{"below is down", upAll, 3, "operational state lower layer down"},
		{"newer than we", upAll, 99, "operational state unknown"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			body := join([]byte{unix.AF_UNSPEC, 0, 0, 0}, u32(7), u32(tc.flags), u32(0),
				attr(unix.IFLA_IFNAME, append([]byte("eth1"), 0)...), attr(unix.IFLA_OPERSTATE, tc.oper),
				attr(iflaParentDevBusName, []byte("pci\x00")...), attr(iflaParentDevName, []byte("0000:3b:00.0\x00")...))
			l, ok := parseLink(body)
			if !ok || l.index != 7 || l.name != "eth1" || l.parentBus != "pci" || l.parent != "0000:3b:00.0" {
				t.Fatalf("parseLink = %+v, %v", l, ok)
			}
			if got := l.reason(); got != tc.reason {
				t.Errorf("reason %q, want %q", got, tc.reason)
			}
			for short := range unix.SizeofIfInfomsg {
				if _, ok := parseLink(body[:short]); ok {
					t.Fatalf("%d bytes were believed", short)
				}
			}
		})
	}
}

func TestTrafficMessage(t *testing.T) {
	header := func(parent uint32) []byte { return join([]byte{0, 0, 0, 0}, u32(7), u32(0x10000), u32(parent), u32(1)) }
	spec := func(rate uint32) []byte { return join(make([]byte, 8), u32(rate), make([]byte, 24)) }
	for _, tc := range []struct {
		name  string
		class bool
		body  []byte
		want  trafficMessage
	}{
		{"tbf", false, join(header(tcRoot), attr(tcaKind, []byte("tbf\x00")...), attr(tcaOptions|unix.NLA_F_NESTED, attr(tcaTBFParms, spec(500e6)...)...)),
			trafficMessage{7, true, "tbf", 4e9}},
		{"tbf above 32 bits", false, join(header(tcRoot), attr(tcaKind, []byte("tbf\x00")...),
			attr(tcaOptions, join(attr(tcaTBFRate64, u64(50e9)...), attr(tcaTBFParms, spec(0xffffffff)...))...)),
			trafficMessage{7, true, "tbf", 400e9}},
		{"tbf below another", false, join(header(0x10001), attr(tcaKind, []byte("tbf\x00")...), attr(tcaOptions, attr(tcaTBFParms, spec(500e6)...)...)),
			trafficMessage{7, false, "tbf", 4e9}},
		{"htb class", true, join(header(tcRoot), attr(tcaKind, []byte("htb\x00")...),
			attr(tcaOptions, join(attr(tcaHTBParms, spec(0xffffffff)...), attr(tcaHTBRate64, u64(100e9)...))...)),
			trafficMessage{7, true, "htb", 800e9}},
		{"no shaper", false, join(header(tcRoot), attr(tcaKind, []byte("mq\x00")...)), trafficMessage{7, true, "mq", 0}},
		{"absurd", false, join(header(tcRoot), attr(tcaKind, []byte("tbf\x00")...), attr(tcaOptions, attr(tcaTBFRate64, u64(1<<62)...)...)),
			trafficMessage{7, true, "tbf", fare.MaxBandwidth}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, ok := parseTraffic(tc.body, tc.class)
			if !ok || got != tc.want {
				t.Errorf("got %+v, %v, want %+v", got, ok, tc.want)
			}
		})
	}
}

// FuzzMessages checks that walking arbitrary bytes ends and stays inside them.
func FuzzMessages(f *testing.F) {
	f.Add(rtnl.AppendMessage(nil, unix.RTM_NEWLINK, 0, 1, join([]byte{0, 0, 0, 0}, u32(7), u32(1), u32(0), attr(unix.IFLA_IFNAME, 'a', 0))))
	f.Add([]byte{})
	f.Add(make([]byte, 16))
	f.Fuzz(func(t *testing.T, b []byte) {
		total := 0
		for m := range rtnl.Messages(b) {
			total += unix.SizeofNlMsghdr + len(m.Body)
			parseLink(m.Body)
			parseTraffic(m.Body, false)
			parseTraffic(m.Body, true)
		}
		if total > len(b) {
			t.Fatal(fmt.Sprint("read ", total, " of ", len(b), " bytes"))
		}
	})
}

func TestNewChecksNames(t *testing.T) {
	_, err := New(Config{SubPorts: []SubPort{{Device: "eth0"}, {Device: ""}, {Device: "a/b"}, {Device: "sixteen-byte-nam"}, {Device: "eth1", Only: SourceConfig}}})
	for _, want := range []string{`sub-port 1: device ""`, `sub-port 2: device "a/b"`, `sub-port 3: device "sixteen-byte-nam"`,
		`sub-port 4: device eth1: speed source "config"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
}

// hardwareMessage returns a datagram about a device, RTM_NEWLINK or RTM_DELLINK. Empty texts and addresses are left
// out.
func hardwareMessage(kind uint16, h *rtnl.Hardware, flags uint32) []byte {
	body := join([]byte{unix.AF_UNSPEC, 0, 0, 0}, u32(uint32(h.Index)), u32(flags), u32(0), attr(unix.IFLA_IFNAME, append([]byte(h.Name), 0)...), attr(unix.IFLA_OPERSTATE, operUp))
	var names []byte
	for _, name := range strings.Fields(h.AltNames) {
		names = append(names, attr(unix.IFLA_ALT_IFNAME, append([]byte(name), 0)...)...)
	}
	if names != nil {
		body = append(body, attr(unix.IFLA_PROP_LIST|unix.NLA_F_NESTED, names...)...)
	}
	for kind, address := range map[uint16]string{unix.IFLA_ADDRESS: h.Address, unix.IFLA_PERM_ADDRESS: h.Permanent} {
		if mac, err := net.ParseMAC(address); err == nil {
			body = append(body, attr(kind, mac...)...)
		}
	}
	return rtnl.AppendMessage(nil, kind, 0, 0, body)
}

// matching returns the namespace of a Watcher of sub-ports p0, p1 and so on, each with a match for a MAC address from
// 02:00:00:00:00:00 on, without devices.
func matching(t testing.TB, ports int) *namespace {
	t.Helper()
	var cfg Config
	for i := range ports {
		match, err := devmatch.Parse(fmt.Sprintf("mac:02:00:00:00:00:%02x", i))
		if err != nil {
			t.Fatal(err)
		}
		cfg.SubPorts = append(cfg.SubPorts, SubPort{Device: fmt.Sprint("p", i), Match: match})
	}
	w, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	n := w.namespaces[0]
	n.devices = map[int]rtnl.Hardware{}
	return n
}

// TestMissingDevice compares the reasons of absent devices, which are kept while no device changes, with those of the
// devices that exist, after random changes of devices.
func TestMissingDevice(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 1))
	n := matching(t, 3)
	devices := map[int]*rtnl.Hardware{}
	seen := map[string]bool{}
	for step := range 3000 {
		h := &rtnl.Hardware{Index: 1 + rng.IntN(5)}
		switch last := devices[h.Index]; {
		case last == nil:
			h.Name, h.Address = fmt.Sprint("eth", h.Index), "02:00:00:00:00:09"
		case rng.IntN(4) == 0:
			n.applyAll(hardwareMessage(unix.RTM_DELLINK, last, 0))
			delete(devices, h.Index)
			h = nil
		default:
			*h = *last
		}
		if h != nil {
			mac := fmt.Sprintf("02:00:00:00:00:%02x", rng.IntN(4))
			name := fmt.Sprint("p", rng.IntN(3))
			for index, other := range devices { // the kernel refuses a second device with a name
				if index != h.Index && slices.Contains(other.Names(), name) {
					name = fmt.Sprint("eth", h.Index)
				}
			}
			switch rng.IntN(6) {
			case 0:
				h.Name = name
			case 1:
				h.Name = fmt.Sprint("eth", h.Index)
			case 2:
				h.AltNames = name
			case 3:
				h.AltNames = ""
			case 4:
				h.Address = mac
			case 5:
				h.Permanent = mac
			}
			devices[h.Index] = h
			n.applyAll(hardwareMessage(unix.RTM_NEWLINK, h, unix.IFF_UP|unix.IFF_LOWER_UP))
		}
		n.reportAll()

		var all []rtnl.Hardware
		for index := range 6 {
			if h := devices[index]; h != nil {
				all = append(all, *h)
			}
		}
		for i, p := range n.ports {
			e := n.w.state[i]
			at, holder, err := p.match.For("", p.device, all)
			var want string
			switch {
			case err != nil:
				want = err.Error()
			case at != holder:
				want = fmt.Sprintf("%s (%s) is down, or does not have the name %s, which the data plane gives", all[at].Name, p.match, p.device)
			}
			seen[strings.NewReplacer("0", "", "1", "", "2", "", "3", "", "4", "", "5", "").Replace(want)] = true
			if e.Reason != want || e.Up != (want == "") || want == "" && e.Ifindex != all[at].Index {
				t.Fatalf("step %d: %s is %+v with %+v; want %q", step, p.device, e, all, want)
			}
		}
	}
	if len(seen) < 6 {
		t.Errorf("only these reasons: %v", seen)
	}
}

// TestForeignMessage checks that messages about other state than that of the devices' hardware, and about carriers,
// make no port search all devices for its own.
func TestForeignMessage(t *testing.T) {
	n := matching(t, 1)
	for index := 1; index <= 300; index++ {
		n.applyAll(hardwareMessage(unix.RTM_NEWLINK, &rtnl.Hardware{Index: index, Name: fmt.Sprint("pod", index), Address: "02:01:00:00:00:00"}, unix.IFF_UP))
	}
	n.reportAll()
	for what, datagram := range map[string][]byte{
		"an address": rtnl.AppendMessage(nil, unix.RTM_NEWADDR, 0, 0, join([]byte{unix.AF_INET, 32, 0, 0}, u32(7), attr(unix.IFA_LOCAL, 192, 0, 2, 1))),
		"a carrier":  hardwareMessage(unix.RTM_NEWLINK, &rtnl.Hardware{Index: 7, Name: "pod7", Address: "02:01:00:00:00:00"}, unix.IFF_UP|unix.IFF_LOWER_UP),
	} {
		n.applyAll(datagram)
		if allocated := testing.AllocsPerRun(10, n.reportAll); allocated != 0 {
			t.Errorf("%s: %v allocations for a report of state that is known", what, allocated)
		}
	}
}

// BenchmarkForeignMessage measures an address message on a server with 1,000 devices, whose 8 sub-ports have no device.
func BenchmarkForeignMessage(b *testing.B) {
	n := matching(b, 8)
	for index := 1; index <= 1000; index++ {
		n.applyAll(hardwareMessage(unix.RTM_NEWLINK, &rtnl.Hardware{Index: index, Name: fmt.Sprint("pod", index), Address: "02:01:00:00:00:00"}, unix.IFF_UP))
	}
	datagram := rtnl.AppendMessage(nil, unix.RTM_NEWADDR, 0, 0, join([]byte{unix.AF_INET, 32, 0, 0}, u32(7), attr(unix.IFA_LOCAL, 192, 0, 2, 1)))
	for b.Loop() {
		n.applyAll(datagram)
		n.reportAll()
	}
}
