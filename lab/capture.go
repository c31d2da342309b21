package lab

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/fared/fared/topo"
)

// capture records what every leaf and spine sees, BGP and the lab's packets, into a folder, the last 20 MB of each: who looks for
// what went wrong wants to read it. What queue pairs carry is too much for that. Without tcpdump there are none.
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
	ended := func(err error) { b.log.Warn("a capture ends early", "error", err) } // which is no failure of the fabric
	p, err := startProcess(b.namespace(n.Name), n.Name, "tcpdump", filepath.Join(dir, "tcpdump.log"), ended, tcpdump,
		"-i", "any", "-n", "-s", "160", "-B", "4096", "-C", "10", "-W", "2", "-Z", "root", "-w", filepath.Join(dir, "capture.pcap"), filter)
	if err == nil {
		b.captures = append(b.captures, p)
	}
	return err
}

// endCaptures has every capture write what it holds.
func (b *real) endCaptures() {
	for _, p := range b.captures {
		p.ask()
	}
	for _, p := range b.captures {
		p.wait(patience)
	}
	b.captures = nil
}
