package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon/config"
)

const (
	// supportPatience limits one command of a bundle.
	supportPatience = 15 * time.Second
	// supportRest ends a command that follows the daemon, once it has written nothing for this time.
	supportRest = time.Second
	// supportSize limits the output of one command or file, bytes. Of a longer file the end is kept, of a longer output
	// the beginning.
	supportSize = 16 << 20
)

// supportItem is a file of a bundle: the output of a command, or a copy of a file.
type supportItem struct {
	name    string
	command []string
	file    string
	// follows marks a command that never ends by itself. It ends supportRest after its last output, so that a slow
	// start loses nothing.
	follows bool
}

// supportItems returns the content of a bundle. No item has secrets: passwords and keys are in files that the
// configuration names, and ss shows the keys of TCP MD5 only with --info.
func supportItems(self, socket, dataplane, file string, cfg *config.Config) []supportItem {
	daemon := func(args ...string) []string { return append([]string{self, "--socket", socket}, args...) }
	items := []supportItem{
		{name: "version.txt", command: []string{self, "version"}},
		{name: "config.yaml", file: file},
		{name: "check.txt", command: []string{self, "check", "--config", file}},
		{name: "health.txt", command: daemon("health")},
		{name: "status.json", command: daemon("status", "-o", "json")},
		{name: "sessions.json", command: daemon("sessions", "-o", "json")},
		{name: "planes.json", command: daemon("planes", "-o", "json")},
		{name: "weights.json", command: daemon("weights", "-o", "json")},
		{name: "events.json", command: daemon("watch", "--events", "--recent", fmt.Sprint(maxRecent), "-o", "json"), follows: true},
		{name: "dataplane.txt", command: []string{self, "dataplane", "show", "--socket", dataplane}},
		{name: "rdma.txt", command: []string{self, "rdma"}},
		{name: "journal.txt", command: []string{"journalctl", "--no-pager", "--output", "short-iso-precise", "--since", "-6h", "--unit", "fared", "--unit", "fared-dataplane"}},
		{name: "units.txt", command: []string{"systemctl", "--no-pager", "--full", "status", "fared", "fared-dataplane"}},
		{name: "system/kernel.txt", command: []string{"uname", "-a"}},
		{name: "system/release.txt", file: "/etc/os-release"},
		{name: "system/memory.txt", file: "/proc/meminfo"},
		{name: "system/load.txt", file: "/proc/loadavg"},
		{name: "network/links.txt", command: []string{"ip", "-details", "-statistics", "link"}},
		{name: "network/addresses.txt", command: []string{"ip", "address"}},
		{name: "network/neighbors.txt", command: []string{"ip", "neighbor"}},
		{name: "network/rules.txt", command: []string{"ip", "rule"}},
		{name: "network/routes.txt", command: []string{"ip", "-details", "route", "show", "table", "all"}},
		{name: "network/routes6.txt", command: []string{"ip", "-6", "-details", "route", "show", "table", "all"}},
		{name: "network/nexthops.txt", command: []string{"ip", "-details", "nexthop"}},
		{name: "network/qdiscs.txt", command: []string{"tc", "-statistics", "qdisc"}},
		{name: "network/bpf.txt", command: []string{"bpftool", "net"}},
		{name: "network/sockets.txt", command: []string{"ss", "--tcp", "--all", "--numeric", "--processes", "( sport = :bgp or dport = :bgp )"}},
		{name: "network/sysctls.txt", command: []string{"sysctl", "--all", "--pattern", `ip_forward|forwarding|fib_multipath|rp_filter|arp_|tcp_ao|tcp_l3mdev`}},
		{name: "network/lldp.txt", command: []string{"lldpctl"}},
	}
	if cfg != nil && cfg.Record.File != "" {
		items = append(items, supportItem{name: "record.jsonl", file: cfg.Record.File})
	}
	return items
}

func supportCommand(e *cli.Env) *cobra.Command {
	var file, to, dataplane string
	c := &cobra.Command{
		Use: "support", Short: "Collect a bundle for a bug report", Args: cli.NoArgs,
		Long: `Writes an archive (tar.gz) with the state of the daemon and of its agent, the configuration,
the last hours of the log, the recording if record.file is set, and the kernel's links, routes,
nexthops, queues and sockets. It contains addresses and names of your network, and no passwords
or keys. What cannot be collected is listed, and the rest is written: the daemon need not run.

Run it as root: other users see neither the log nor all of the kernel's objects.`,
		Example: "  sudo fared support\n  sudo fared support --to /tmp/server7.tar.gz",
		RunE: func(c *cobra.Command, _ []string) error {
			self, err := os.Executable()
			if err != nil {
				return cli.Failed(err, "")
			}
			host, err := os.Hostname()
			if err != nil {
				host = "unknown"
			}
			name := "fared-support-" + host + "-" + time.Now().UTC().Format("20060102T150405Z")
			cfg, err := config.Load(file)
			if err != nil {
				fmt.Fprintf(e.Err, "fared: without the recording and the metrics, because the configuration cannot be read: %v\n", err)
			}
			to = cmp.Or(to, name+".tar.gz")
			problems, err := collectSupport(c.Context(), e, to, name, supportItems(self, e.Socket, dataplane, file, cfg), cfg)
			if err != nil {
				return cli.Failed(fmt.Errorf("%s: %w", to, err), "nothing was written; name another file with --to")
			}
			for _, p := range problems {
				fmt.Fprintf(e.Err, "fared: %s\n", p)
			}
			fmt.Fprintln(e.Out, to)
			return nil
		},
	}
	cli.ConfigFlag(c, &file)
	c.Flags().StringVar(&to, "to", "", "archive to write; default fared-support-HOST-TIME.tar.gz in this directory")
	c.Flags().StringVar(&dataplane, "dataplane", defaultDataplane, "socket of the agent")
	_ = c.MarkFlagFilename("to", "gz")
	return c
}

// collectSupport writes a bundle, whose files are in the folder name, and returns what could not be collected, and
// commands that failed.
func collectSupport(ctx context.Context, e *cli.Env, to, name string, items []supportItem, cfg *config.Config) (problems []string, err error) {
	file, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err = errors.Join(err, file.Close()); err != nil {
			err = errors.Join(err, os.Remove(to))
		}
	}()
	zip := gzip.NewWriter(file)
	out := tar.NewWriter(zip)
	put := func(file string, content []byte) error {
		if err := out.WriteHeader(&tar.Header{Name: name + "/" + file, Mode: 0o600, Size: int64(len(content)), ModTime: time.Now()}); err != nil {
			return err
		}
		_, err := out.Write(content)
		return err
	}
	for i, item := range items {
		if e.Terminal != nil {
			fmt.Fprintf(e.Err, "\r%2d of %d %-40s\r", i+1, len(items), item.name)
		}
		content, problem := item.collect(ctx)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if problem != nil {
			problems = append(problems, item.name+": "+problem.Error())
		}
		if err := put(item.name, content); err != nil {
			return nil, err
		}
	}
	if cfg != nil && cfg.Metrics.Listen != "" {
		content, problem := metricsOf(ctx, cfg.Metrics.Listen)
		if problem != nil {
			problems = append(problems, "metrics.txt: "+problem.Error())
		}
		if err := put("metrics.txt", content); err != nil {
			return nil, err
		}
	}
	if err := put("problems.txt", []byte(strings.Join(append(problems, ""), "\n"))); err != nil {
		return nil, err
	}
	return problems, errors.Join(out.Close(), zip.Close())
}

// collect returns an item's content. With an error there is the part before it.
func (i *supportItem) collect(ctx context.Context) ([]byte, error) {
	if i.file != "" {
		return fileEnd(i.file)
	}
	ctx, cancel := context.WithTimeout(ctx, supportPatience)
	defer cancel()
	var out bounded
	cmd := exec.CommandContext(ctx, i.command[0], i.command[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, time.Second
	if i.follows {
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		out.rest = time.AfterFunc(supportPatience, cancel)
		defer out.rest.Stop()
	}
	err := cmd.Run()
	if errors.Is(err, exec.ErrNotFound) {
		return nil, fmt.Errorf("%s is not installed", i.command[0])
	}
	if i.follows && ctx.Err() != nil && out.Len() > 0 {
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", strings.Join(append([]string{filepath.Base(i.command[0])}, i.command[1:]...), " "), cmp.Or(ctx.Err(), err))
	}
	return out.Bytes(), err
}

// bounded is a buffer that drops what exceeds supportSize. Each write sets rest, if any, to supportRest.
type bounded struct {
	bytes.Buffer
	rest *time.Timer
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.rest != nil {
		b.rest.Reset(supportRest)
	}
	b.Buffer.Write(p[:min(len(p), supportSize-b.Len())])
	return len(p), nil
}

// fileEnd returns the end of a file, at most supportSize bytes.
func fileEnd(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > supportSize {
		if _, err := f.Seek(-supportSize, io.SeekEnd); err != nil {
			return nil, err
		}
	}
	return io.ReadAll(io.LimitReader(f, supportSize))
}

// metricsOf returns the metrics of a daemon.
func metricsOf(ctx context.Context, address string) ([]byte, error) {
	if strings.HasPrefix(address, ":") {
		address = "localhost" + address
	}
	ctx, cancel := context.WithTimeout(ctx, supportPatience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(io.LimitReader(resp.Body, supportSize))
}
