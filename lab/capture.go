package lab

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/fared/fared/topo"
)

// capture records the packets at every leaf and spine, BGP and the lab's own, into a folder, the last 20 MB of each, to
// explain a failure later. Queue pair traffic is too much to record. Without tcpdump there are no captures.
func (b *real) capture(dir string) error {
	tcpdump, err := exec.LookPath("tcpdump")
	if err != nil {
		b.log.Info("no captures: tcpdump is not installed")
		return nil
	}
	for _, n := range slices.Concat(b.Leaf, b.Spine) {
		if err := b.captureNode(n, tcpdump, filepath.Join(dir, n.Name)); err != nil {
			return err
		}
	}
	return nil
}

func (b *real) captureNode(n *topo.Node, tcpdump, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	filter := "tcp port 179 or icmp"
	if b.options.Transport == "" {
		filter += " or udp port 4791"
	}
	ended := func(err error) { b.log.Warn("a packet capture ended early", "error", err) } // the fabric has not failed
	p, err := startProcess(b.namespace(n.Name), n.Name, "tcpdump", filepath.Join(dir, "tcpdump.log"), ended, tcpdump,
		"-i", "any", "-n", "-s", "160", "-B", "4096", "-C", "10", "-W", "2", "-Z", "root", "-w", filepath.Join(dir, "capture.pcap"), filter)
	if err == nil {
		b.captures = append(b.captures, p)
	}
	return err
}

// endCaptures stops the captures, so that each flushes its buffer.
func (b *real) endCaptures() {
	for _, p := range b.captures {
		p.ask()
	}
	for _, p := range b.captures {
		p.wait(patience)
	}
	b.captures = nil
}
