package roce

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

// inNamespace opens a transport's sockets in a namespace.
type inNamespace struct {
	*Transport
	ns *netnstest.Namespace
}

func (i inNamespace) Start(h rdma.Host) error {
	return i.ns.Do(func() error { return i.Transport.Start(h) })
}

// newBed returns two namespaces connected by a veth pair.
func newBed(t *testing.T, addresses [2]netip.Addr) [2]*netnstest.Namespace {
	bits := "/24"
	if addresses[0].Is6() {
		bits = "/64"
	}
	a, b := netnstest.Pair(t, "eth0", addresses[0].String()+bits, addresses[1].String()+bits)
	// A veth pair may carry whole batches; a wire carries packets.
	for _, ns := range []*netnstest.Namespace{a, b} {
		ns.Run("ethtool", "-K", "eth0", "tx-udp-segmentation", "off", "gso", "off")
	}
	// Neighbors are static, so that no packet waits for their resolution.
	for i, ns := range []*netnstest.Namespace{a, b} {
		other := []*netnstest.Namespace{b, a}[i]
		ns.IP("neigh", "replace", addresses[1-i].String(), "lladdr", other.Device("eth0").HardwareAddr.String(), "dev", "eth0", "nud", "permanent")
	}
	return [2]*netnstest.Namespace{a, b}
}

// TestOnTheWire carries operations of all kinds between two namespaces, and checks every packet with tshark.
func TestOnTheWire(t *testing.T) {
	netnstest.Require(t, "tshark", "tcpdump", "ethtool")
	for name, addresses := range map[string][2]netip.Addr{
		"IPv4": {netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")},
		"IPv6": {netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")},
	} {
		t.Run(name, func(t *testing.T) {
			spaces := newBed(t, addresses)
			file := filepath.Join(netnstest.Folder(t), "packets.pcap")
			capture := spaces[1].Start(t, "tcpdump", "-Z", "root", "-U", "-B", "32768", "-s", "0", "-i", "eth0", "-w", file, "udp", "port", "4791")
			capture.AwaitText(t, "listening on")
			bed := rdmatest.Real(rdmatest.RealConfig{Addresses: addresses, Transports: [2]rdma.Transport{
				inNamespace{New(Config{}), spaces[0]}, inNamespace{New(Config{}), spaces[1]}}})
			r := rdmatest.ChannelsOn(t, bed, rdmatest.Options{Ops: 400, NotReady: 0.1, Settle: 50 * time.Millisecond, Kinds: everyKind})
			t.Log(r.Counters[0])
			for _, c := range r.Counters {
				if c["bad_icrc"]+c["malformed"]+c["dropped_no_gso"]+c["dropped_failed"] != 0 {
					t.Errorf("packets are wrong: %v", c)
				}
			}
			// The packets that arrived where tcpdump listens, and those sent from there: the kernel may drop the others
			// on their way.
			passed := r.Counters[1]["packets_received"] + r.Counters[1]["sent"]
			netnstest.Eventually(t, time.Minute, func() error {
				p, err := readCapture(file)
				if err == nil && uint64(len(p)) < passed {
					err = fmt.Errorf("%d packets captured of %d", len(p), passed)
				}
				return err
			})
			_ = capture.Signal(unix.SIGINT)
			capture.Stop()
			p, err := readCapture(file) // more than before: channels are closed with operations in flight
			if err != nil {
				t.Fatal(err)
			}
			checkICRCs(t, p)
			dissect(t, file, len(p))
		})
	}
}

// captured is a frame starting at the Ethernet header.
type captured []byte

// readCapture reads a pcap file in host byte order.
func readCapture(file string) ([]captured, error) {
	b, err := os.ReadFile(file)
	if err != nil || len(b) < 24 {
		return nil, fmt.Errorf("%d bytes: %w", len(b), err)
	}
	if magic := binary.NativeEndian.Uint32(b); magic != 0xa1b2c3d4 {
		return nil, fmt.Errorf("magic %#x", magic)
	}
	var p []captured
	for b = b[24:]; len(b) >= 16; {
		n := int(binary.NativeEndian.Uint32(b[8:]))
		if len(b) < 16+n {
			break // the record is not complete yet
		}
		p = append(p, b[16:16+n])
		b = b[16+n:]
	}
	return p, nil
}

// checkICRCs computes each packet's ICRC bit by bit from the captured bytes, including its IPv4 identification.
func checkICRCs(t *testing.T, p []captured) {
	t.Helper()
	identified := 0
	for i, frame := range p {
		packet := frame[14:]
		n := int(binary.BigEndian.Uint16(packet[4:])) + 40
		if packet[0]>>4 == 4 {
			n = int(binary.BigEndian.Uint16(packet[2:]))
			if binary.BigEndian.Uint16(packet[4:]) != 0 {
				identified++
			}
		}
		packet = packet[:n]
		end := n - icrcSize
		if want := dumbICRC(packet[:end]); !bytes.Equal(want[:], packet[end:]) {
			t.Errorf("packet %d: ICRC %x, want %x: %x", i+1, packet[end:], want, packet[:end])
			return
		}
	}
	t.Logf("%d ICRCs are right; %d packets have an IPv4 identification", len(p), identified)
}

// dissect checks with tshark that it recognizes every packet as RoCEv2, that all opcodes occur, and that no packet is
// malformed.
func dissect(t *testing.T, file string, n int) {
	t.Helper()
	space := netnstest.New(t)
	args := []string{"-r", file, "--disable-protocol", "nvme-rdma"}
	// tshark must not interpret the random payload as other protocols.
	for _, guess := range []string{"eth_over_ib", "fc_infiniband", "iser_infiniband", "lnet_ib", "mellanox_eoib", "rpcrdma_infiniband",
		"sdp_infiniband", "smb_direct_infiniband", "smcr_infiniband"} {
		args = append(args, "--disable-heuristic", guess)
	}
	out, err := space.Output("tshark", append(args, "-T", "json", "-e", "frame.protocols", "-e", "infiniband.bth.opcode", "-e", "infiniband.bth.p_key",
		"-e", "infiniband.invariant.crc", "-e", "infiniband.aeth.syndrome.opcode", "-e",
		"_ws.expert.message", "-e", "_ws.malformed")...)
	if err != nil {
		t.Fatal(err)
	}
	var frames []struct {
		Source struct {
			Layers map[string][]string `json:"layers"`
		} `json:"_source"`
	}
	if err := json.Unmarshal(out, &frames); err != nil {
		t.Fatal(err)
	}
	if len(frames) != n {
		t.Errorf("tshark shows %d packets of %d", len(frames), n)
	}
	seen := make(map[int64]int)
	for i, f := range frames {
		l := f.Source.Layers
		if len(l["infiniband.bth.opcode"]) != 1 || len(l["infiniband.invariant.crc"]) != 1 || l["_ws.expert.message"] != nil || l["_ws.malformed"] != nil {
			t.Fatalf("packet %d: %v", i+1, l)
		}
		op, err := strconv.ParseInt(l["infiniband.bth.opcode"][0], 0, 16)
		if err != nil {
			t.Fatal(err)
		}
		seen[op]++
	}
	for o := sendFirst; o < opcodes; o++ {
		if traits[o]&hasImm == 0 && seen[int64(o)] == 0 {
			t.Errorf("no packet has opcode %d", o)
		}
	}
	t.Logf("packets by opcode: %v", seen)
}
