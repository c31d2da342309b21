package backend

import (
	"context"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/fared/fared/topo"
)

// frrDir holds FRR's daemons, in its own packages and in Debian's.
const frrDir = "/usr/lib/frr"

// startFRR starts zebra and bgpd on a node, without watchfrr, both with the node's frr.conf: each ignores the lines for
// the other.
func (b *namespaces) startFRR(ctx context.Context, n *topo.Node) error {
	dir := filepath.Join(b.Dir, n.Name)
	sockets := filepath.Join(dir, "frr")
	if err := os.MkdirAll(sockets, 0o755); err != nil {
		return err
	}
	owner, err := user.Lookup("frr")
	if err != nil {
		return err
	}
	uid, _ := strconv.Atoi(owner.Uid)
	gid, _ := strconv.Atoi(owner.Gid)
	if err := os.Chown(sockets, uid, gid); err != nil {
		return err
	}
	daemons := []struct{ name, ready string }{{"zebra", "zserv"}, {"bgpd", "bgpd.vty"}}
	if b.BFD > 0 {
		daemons = slices.Insert(daemons, 1, struct{ name, ready string }{"bfdd", "bfdd.vty"})
	}
	for _, daemon := range daemons {
		ready := filepath.Join(sockets, daemon.ready)
		_ = os.Remove(ready) // left by a daemon that was killed
		args := []string{"-u", "frr", "-g", "frr", "-f", filepath.Join(dir, "frr.conf"), "-i", filepath.Join(sockets, daemon.name+".pid"),
			"-z", filepath.Join(sockets, "zserv"), "--vty_socket", sockets, "-A", "127.0.0.1", "-P", "0", "--log", "stdout"}
		if daemon.name == "bfdd" {
			args = append(args, "--bfdctl", filepath.Join(sockets, "bfdd.sock"))
		}
		err = b.spawn(n, daemon.name, filepath.Join(frrDir, daemon.name), args...)
		if err != nil {
			return err
		}
		if err := appears(ctx, ready); err != nil {
			return fmt.Errorf("%s: %s does not start: %w", n.Name, daemon.name, err)
		}
	}
	return nil
}

// appears waits until a file exists.
func appears(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		if err := Sleep(ctx, 10*time.Millisecond); err != nil {
			return fmt.Errorf("no %s: %w", path, err)
		}
	}
}
