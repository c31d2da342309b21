package probe

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// Captures are the running captures of a fabric.
type Captures []*backend.Process

// StartCaptures records the packets at nodes, BGP and the lab's own, into a folder, the last 20 MB of each, to explain
// a failure later. Queue pair traffic is too much to record: carried leaves it out. Without tcpdump there are no
// captures. The captures are valid with an error, too.
func StartCaptures(h backend.Hosts, nodes []*topo.Node, carried bool, dir string, log *slog.Logger) (Captures, error) {
	tcpdump, err := exec.LookPath("tcpdump")
	if err != nil {
		log.Info("no captures: tcpdump is not installed")
		return nil, nil
	}
	// A receiver is no UDP socket, so the kernel answers probes of a node without one with ICMP port unreachable.
	filter := "tcp port 179 or (icmp and not (icmp[0] == 3 and icmp[1] == 3))"
	if !carried {
		filter += fmt.Sprintf(" or udp port %d", rocePort)
	}
	ended := func(err error) { log.Warn("a packet capture ended early", "error", err) } // the fabric has not failed
	var all Captures
	for _, n := range nodes {
		own := filepath.Join(dir, n.Name)
		if err := os.MkdirAll(own, 0o755); err != nil {
			return all, err
		}
		p, err := backend.StartProcess(h.Namespace(n.Name), n.Name, "tcpdump", filepath.Join(own, "tcpdump.log"), ended, tcpdump,
			"-i", "any", "-n", "-s", "160", "-B", "4096", "-C", "10", "-W", "2", "-Z", "root", "-w", filepath.Join(own, "capture.pcap"), filter)
		if err != nil {
			return all, err
		}
		all = append(all, p)
	}
	return all, nil
}

// Close stops the captures, so that each flushes its buffer.
func (c Captures) Close() {
	for _, p := range c {
		p.Ask()
	}
	for _, p := range c {
		p.Wait(backend.Patience)
	}
}
