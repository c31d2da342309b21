package traffic

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
)

// LocalConfig is the configuration of nodes inside one process.
type LocalConfig struct {
	// Nodes is the number of nodes, 2 to 64.
	Nodes     int
	Transport string
	Planes    map[string]string
	// MTU is TransportOptions.MTU.
	MTU int
	// Slots are the slots of every pair; nil means LocalSlots.
	Slots []Slot
	// Run is the configuration of the run to come, which determines the amount of shared memory.
	Run Config
	Log *slog.Logger
}

// LocalSlots returns one slot in each of four planes, with equal shares.
func LocalSlots() []Slot {
	return []Slot{{"p0", "", 49152, 1}, {"p1", "", 49153, 1}, {"p2", "", 49154, 1}, {"p3", "", 49155, 1}}
}

// Local is a set of nodes inside this process, on addresses of 127.0.0.0/8. Their planes differ only in name: all use
// the same kernel.
type Local struct {
	// Servers are the arguments of Coordinate.
	Servers []Server
	nodes   []*localNode
	folder  string
}

type localNode struct {
	*Node
	cancel  context.CancelFunc
	serving sync.WaitGroup
	conn    *grpc.ClientConn
}

// localControl is the TCP port of the nodes for coordinators. A port chosen by the kernel might belong to a slot, and
// flows could not be dialed from it.
const localControl = 4795

// MaxLocalNodes is the maximum of LocalConfig.Nodes.
const MaxLocalNodes = 64

// StartLocal starts nodes. Several processes can do so at the same time, because their addresses differ.
func StartLocal(cfg LocalConfig) (*Local, error) { return startLocal(cfg, newTransport, nil) }

func startLocal(cfg LocalConfig, open func(string, TransportOptions) (rdma.Transport, error), wrap func(*end) posting) (*Local, error) {
	if cfg.Nodes < 2 || cfg.Nodes > MaxLocalNodes {
		return nil, fmt.Errorf("%d nodes: use 2 to %d", cfg.Nodes, MaxLocalNodes)
	}
	cfg.Run = cfg.Run.withDefaults()
	if cfg.Slots == nil {
		cfg.Slots = LocalSlots()
	}
	var err error
	for try := range 16 {
		var l *Local
		if l, err = startLocalAt(cfg, localBase(os.Getpid()+try*4099), open, wrap); err == nil {
			return l, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return nil, err
		}
	}
	return nil, err
}

// localBase returns the first three bytes of a process's addresses: 127.64.0 to 127.127.255.
func localBase(n int) [3]byte { return [3]byte{127, 64 + byte(n>>8)&63, byte(n)} }

func startLocalAt(cfg LocalConfig, base [3]byte, open func(string, TransportOptions) (rdma.Transport, error), wrap func(*end) posting) (_ *Local, err error) {
	l := new(Local)
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	options := TransportOptions{MTU: cfg.MTU, Log: cfg.Log}
	if cfg.Transport == "nupa" || slices.Contains(values(cfg.Planes), "nupa") {
		shm := "/dev/shm"
		if _, err := os.Stat(shm); err != nil {
			shm = ""
		}
		if l.folder, err = os.MkdirTemp(shm, "fared-traffic-"); err != nil {
			return nil, err
		}
		options.NupaFile = filepath.Join(l.folder, "plane")
		options.NupaChannels, options.NupaSize = sharedNeeds(cfg)
	}
	for i := range cfg.Nodes {
		at := netip.AddrFrom4([4]byte{base[0], base[1], base[2], byte(1 + i)})
		n, err := newNode(NodeConfig{Sources: []netip.Addr{at}, Transport: cfg.Transport, Planes: cfg.Planes, Options: options, Slots: cfg.Slots, Log: cfg.Log}, open)
		if err != nil {
			return nil, err
		}
		n.wrap = wrap
		ctx, cancel := context.WithCancel(context.Background())
		is := &localNode{Node: n, cancel: cancel}
		l.nodes = append(l.nodes, is)
		listener, err := net.Listen("tcp", netip.AddrPortFrom(at, localControl).String())
		if err != nil {
			return nil, err
		}
		is.serving.Go(func() {
			if err := n.Serve(ctx, listener); err != nil {
				n.cfg.Log.Error("a node has stopped serving", "loopback", at, "error", err)
			}
		})
		if is.conn, err = grpc.NewClient("passthrough:///"+listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
			return nil, err
		}
		l.Servers = append(l.Servers, Server{Name: fmt.Sprint(i), Client: farev1.NewTrafficServiceClient(is.conn)})
	}
	if l.folder != "" { // every node has mapped the file, so it does not remain after any exit of the process
		os.RemoveAll(l.folder)
	}
	return l, nil
}

// Close stops all nodes, including runs in progress.
func (l *Local) Close() {
	for _, n := range l.nodes {
		n.stop()
	}
	for _, n := range l.nodes {
		n.Node.Close()
	}
	if l.folder != "" {
		os.RemoveAll(l.folder)
	}
}

// stop stops a node's server, and with it a run.
func (n *localNode) stop() {
	n.cancel()
	n.serving.Wait()
	if n.conn != nil {
		n.conn.Close()
	}
}

// sharedNeeds returns the maximum number of channel ends, and the maximum size, of the nodes' shared file.
func sharedNeeds(cfg LocalConfig) (channels int, size int64) {
	ends := 2 * cfg.Nodes * (cfg.Nodes - 1)
	channels = min(ends*len(cfg.Slots), 1024)
	const ofChannel, ofEnd, spare = 288 << 10, 256 << 10, 32 << 20 // ofEnd: notes, and page rounding
	size = int64(channels)*ofChannel + int64(ends)*(int64(cfg.Run.Message*cfg.Run.Outstanding)+ofEnd) + int64(cfg.Nodes*blockSize(cfg.Run.Message)) + spare
	return channels, size
}

func values(m map[string]string) (out []string) {
	for _, v := range m {
		out = append(out, v)
	}
	return out
}

// ParsePlanes parses PLANE=TRANSPORT words, at most one for each plane.
func ParsePlanes(words []string) (map[string]string, error) {
	out := map[string]string{}
	for _, w := range words {
		plane, transport, ok := strings.Cut(w, "=")
		switch {
		case !ok || plane == "":
			return nil, fmt.Errorf("plane %q: write PLANE=TRANSPORT", w)
		case out[plane] != "":
			return nil, fmt.Errorf("plane %s is named twice", plane)
		case !slices.Contains(Transports(), transport):
			return nil, fmt.Errorf("plane %s: transport %q is not known: use %s", plane, transport, strings.Join(Transports(), ", "))
		}
		out[plane] = transport
	}
	return out, nil
}
