package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/lab"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// livePace lets a reader follow the live table: most steps take a few milliseconds.
const livePace = 600 * time.Millisecond

// labOptions are the flags of the command.
type labOptions struct {
	lab.Options
	scenario, script, configs      string
	verbose, inNamespaces, cleanup bool
	ui                             string
	play                           labPlay
	real                           backend.Netns
	clab                           backend.Containerlab
	fabric                         *fabricArgs
}

func labCommand(e *cli.Env) *cobra.Command {
	var a labOptions
	c := &cobra.Command{
		Use: "lab", Short: "Watch weights follow failures in a fabric of real BGP sessions",
		Long: `Starts leaves and GPU servers with real BGP sessions on 127.0.0.0/8 and in-memory data
planes, plays a scenario of failures, and checks after each step that every pair of GPUs
has exactly the expected weights. It needs no root and no configuration.

In a terminal a live table shows the fabric at each step; --verbose, or output to a file or
a pipe, gives plain lines instead.

The fabric is described as for 'fared topo': by FILE, --example, flags, or all of them.

With --netns every leaf and server is a network namespace with separate processes, cables
are veth pairs, and 'fared dataplane' programs the kernel. The lab sends packets all the time,
and counts them to verify the weights. This needs root.

With --containerlab FILE the nodes are containers, which containerlab deploys from that topology
file and destroys at the end; a fabric that is already running is used and left running.
'fared topo generate --for containerlab' makes such files. This needs root and Docker.

With --transport, for either of these, every server runs 'fared traffic node': queue pairs take
their slots from its fared and carry verified WRITEs between all GPUs while the scenario is played.
A step fails if a byte is wrong, lost or duplicated, or if an application would have received an
error. The lab then sends no packets of its own.

With --ui the lab plays no scenario, and serves a live page at that address until Ctrl-C: the
fabric as a drawing whose cables a click cuts and mends, and the page of every server.

Scenarios that crash, freeze or cut off processes need --netns or --containerlab; 'all' includes
them there.

Scenarios: ` + strings.Join(lab.Names(), ", ") + `, all; or a script, with --script.
Exit code 1 if an expectation is not met.`,
		Example: "  fared lab\n  fared lab --scenario sub-cable -o json\n  fared lab --servers 64 --scenario leaf\n  fared lab --script scenario.txt\n  fared lab --ui 127.0.0.1:9470\n  sudo fared lab --netns --leaf frr\n  sudo fared lab --netns --transport roce --scenario leaf",
		RunE:    func(c *cobra.Command, args []string) error { return flagErrors(a.run(e, c, args)) },
	}
	a.addFlags(c)
	return cli.ReadFlags(e, c)
}

// addFlags adds the command's flags.
func (a *labOptions) addFlags(c *cobra.Command) {
	a.fabric = addFabricArgs(c)
	f := c.Flags()
	f.StringVar(&a.scenario, "scenario", "all", strings.Join(lab.Names(), ", ")+" or all")
	f.StringVar(&a.script, "script", "", "file with a scenario, instead of a built-in scenario")
	f.BoolVarP(&a.verbose, "verbose", "v", false, "write the daemons' logs to standard error")
	f.StringVar(&a.configs, "write-configs", "", "only write every node's configuration file into this directory; play no scenario")
	f.DurationVar(&a.play.pace, "pace", 0, "delay after each step (default 600ms with the live table in a terminal)")
	f.StringVar(&a.ui, "ui", "", "play no scenario, and serve a live page at this loopback address, host:port")
	f.IntVar(&a.play.runs, "runs", 1, "number of times to play the scenarios on the same fabric, with a summary at the end")
	f.BoolVar(&a.Quick, "quick", false, "shorten drain_delay, start.deadline and connect_retry instead of using fared's defaults")
	f.BoolVar(&a.play.timelines, "timeline", false, "show the times at which weights and packets followed each step (default with --netns and --containerlab)")
	f.BoolVar(&a.inNamespaces, "netns", false, "use network namespaces, processes and the kernel's forwarding (needs root)")
	f.StringVar(&a.real.Driver, "driver", "auto", "with --netns: the data plane's driver, "+strings.Join(backend.Drivers, ", "))
	f.StringVar(&a.clab.File, "containerlab", "", "use containers, deployed by containerlab from this topology file (needs root)")
	f.StringVar(&a.clab.Binary, "containerlab-binary", "containerlab", "with --containerlab: path of the containerlab program")
	f.StringVar(&a.Transport, "transport", lab.Transports[0], "with --netns or --containerlab: transport of the queue pairs for verified traffic, "+strings.Join(lab.Transports, ", "))
	f.StringVar(&a.MemoryPlane, "memory-plane", "", "with --netns and --transport: a plane whose queue pairs use shared memory (nupa), such as p3")
	f.IntVar(&a.real.Rate, "rate", 2000, "with --netns or --containerlab: packets per second of each server, 0 for none")
	f.BoolVar(&a.play.keep, "keep", false, "with --netns or --containerlab: leave the fabric running at the end")
	f.BoolVar(&a.cleanup, "cleanup", false, "with --netns: only remove the leftovers of earlier runs, including the logs of failed runs")
	cli.Choices(c, "driver", backend.Drivers...)
	cli.Choices(c, "transport", lab.Transports...)
	cli.Choices(c, "memory-plane")
	cli.Choices(c, "scenario", append(lab.Names(), "all")...)
	_ = c.MarkFlagFilename("script")
	_ = c.MarkFlagDirname("write-configs")
	c.MarkFlagsMutuallyExclusive("scenario", "script")
	for _, flag := range []string{"scenario", "script", "runs", "pace", "timeline", "write-configs", "cleanup"} {
		c.MarkFlagsMutuallyExclusive("ui", flag)
	}
	c.MarkFlagsMutuallyExclusive("keep", "cleanup")
	c.MarkFlagsMutuallyExclusive("netns", "containerlab")
	_ = c.MarkFlagFilename("containerlab", "yml", "yaml")
}

// run plays the scenarios, or does one of the command's other tasks.
func (a *labOptions) run(e *cli.Env, c *cobra.Command, args []string) error {
	if a.cleanup && a.inNamespaces {
		return cleanLab(c.Context(), e)
	}
	if err := a.resolve(e, c, args); err != nil {
		return err
	}
	scenarios, err := a.load()
	if err != nil {
		return err
	}
	if a.configs != "" {
		return writeLabConfigs(e, a.Options, a.configs)
	}
	for _, s := range scenarios {
		if err := lab.Check(a.Options, s); err != nil {
			return cli.Usage(err, "change the fabric's size with flags, or correct the script: /usr/share/doc/fared/labs.md")
		}
	}
	if err := a.require(); err != nil {
		return cli.Failed(err, "run the command with sudo where its tools are installed; without --netns and --containerlab the lab needs neither")
	}
	if a.inNamespaces {
		if a.real.Binary, err = cli.Program("fared"); err != nil {
			return err
		}
	}
	log := slog.New(slog.DiscardHandler)
	if a.verbose {
		log = cli.NewLogger(e.Err, slog.LevelInfo)
	}
	if a.ui != "" {
		return showLab(c.Context(), e, a.Options, a.ui, log)
	}
	show, live := newLabShow(e, a.Options, scenarios, a.play.runs, a.verbose)
	a.real.Progress, a.clab.Progress, a.Progress = show.progress, show.progress, show.progress
	if live && !c.Flags().Changed("pace") {
		a.play.pace = livePace
	}
	// When the terminal closes, the lab has to stop its processes.
	ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGHUP)
	defer stop()
	return playLab(ctx, e, a.Options, scenarios, a.play, show, log)
}

// resolve completes the lab's options by the flags, and rejects flags that contradict each other or that the kind of
// lab does not support.
func (a *labOptions) resolve(e *cli.Env, c *cobra.Command, args []string) error {
	if err := a.play.validate(); err != nil {
		return err
	}
	var err error
	if a.clab.File != "" {
		if err := containerFabric(c, args, &a.Options, &a.clab); err != nil {
			return err
		}
	} else if a.Spec, err = a.fabric.spec(args); err != nil {
		return err
	}
	if a.real.Rate == 0 {
		a.real.Rate = -1 // -1 sends no packets, as requested
	}
	a.clab.Rate = a.real.Rate
	if err := a.validateTransport(c); err != nil {
		return err
	}
	if a.Transport == lab.Transports[0] {
		a.Transport = ""
	}
	if err := a.validateKind(c); err != nil {
		return err
	}
	if a.inNamespaces {
		a.Netns = &a.real
	}
	if !c.Flags().Changed("timeline") {
		a.play.timelines = a.separate()
	}
	a.Timeline = a.play.timelines || a.play.runs > 1 // the summary needs timelines
	if !a.separate() {
		onlyFared(e, c, &a.Spec)
	}
	if _, err := lab.Configs(a.Options); err != nil {
		return cli.Usage(err, "/usr/share/doc/fared/labs.md lists the limits of each kind of lab")
	}
	a.Spec, err = lab.Resolve(a.Options)
	return err
}

// separate reports whether nodes have separate processes.
func (a *labOptions) separate() bool { return a.inNamespaces || a.clab.File != "" }

// validateTransport rejects flags of queue pair traffic that contradict others.
func (a *labOptions) validateTransport(c *cobra.Command) error {
	if err := cli.OneOf("transport", a.Transport, lab.Transports...); err != nil {
		return err
	}
	none := a.Transport == lab.Transports[0]
	switch {
	case a.MemoryPlane != "" && (!a.inNamespaces || none):
		return cli.Usage(errors.New("--memory-plane needs a fabric of network namespaces whose other planes have a transport"), "add --netns --transport roce, or leave it out")
	case !none && !a.separate():
		return cli.Usage(errors.New("--transport needs a fabric of network namespaces or containers"), "add --netns or --containerlab, or leave it out")
	case !none && firstSet(c, "rate") != "":
		return cli.Usage(errors.New("--rate has no effect with --transport: queue pairs send, not the lab"), "leave one of them out")
	}
	return nil
}

// validateKind rejects flags that only another kind of lab has.
func (a *labOptions) validateKind(c *cobra.Command) error {
	if a.inNamespaces {
		if name := firstSet(c, "containerlab-binary"); name != "" {
			return cli.Usage(fmt.Errorf("--%s needs a fabric of containers", name), "add --containerlab FILE, or leave it out")
		}
		return nil
	}
	if name := firstSet(c, "driver", "cleanup"); name != "" {
		return cli.Usage(fmt.Errorf("--%s needs a fabric of network namespaces", name), "add --netns, or leave it out")
	}
	if name := firstSet(c, "rate", "keep", "containerlab-binary"); name != "" && a.clab.File == "" {
		return cli.Usage(fmt.Errorf("--%s needs a fabric of network namespaces or containers", name), "add --netns or --containerlab, or leave it out")
	}
	return nil
}

// load returns the scenarios to play.
func (a *labOptions) load() ([]*lab.Scenario, error) {
	scenarios, err := lab.Load(a.scenario, a.Options)
	if err != nil {
		return nil, cli.Usage(err, "'fared lab --help' lists the scenarios")
	}
	if a.script == "" {
		return scenarios, nil
	}
	f, err := os.Open(a.script)
	if err != nil {
		return nil, cli.Usage(err, "name a file with --script")
	}
	defer f.Close()
	s, err := lab.Parse(filepath.Base(a.script), f)
	if err != nil {
		return nil, cli.Usage(err, "/usr/share/doc/fared/labs.md describes scripts")
	}
	return []*lab.Scenario{s}, nil
}

// require returns an error that names a missing requirement of this kind of lab, or nil.
func (a *labOptions) require() error {
	switch {
	case a.inNamespaces:
		return a.real.Require(a.Spec)
	case a.clab.File != "":
		return a.clab.Require()
	}
	return nil
}

// containerFabric reads the description of a fabric of containers, which is next to its topology file.
func containerFabric(c *cobra.Command, args []string, o *lab.Options, clab *backend.Containerlab) error {
	if len(args) > 0 {
		return cli.Usage(fmt.Errorf("--containerlab %s already has a description, in addition to %s", clab.File, args[0]), "leave one of them out")
	}
	for _, k := range topo.Keys() {
		if flag := strings.ReplaceAll(k.Name, "_", "-"); c.Flags().Changed(flag) {
			return cli.Usage(fmt.Errorf("--%s cannot change a fabric of containers", flag), "'fared topo generate --for containerlab' makes another fabric")
		}
	}
	var err error
	if o.Spec, err = readFabric(filepath.Join(filepath.Dir(clab.File), topo.SpecFile)); err != nil {
		return err
	}
	o.Containerlab = clab
	if err := clab.Matches(o.Spec); err != nil {
		return cli.Usage(err, "generate both again: fared topo generate --for containerlab")
	}
	return nil
}

// firstSet returns the first of the given flags, or "".
func firstSet(c *cobra.Command, names ...string) string {
	for _, name := range names {
		if c.Flags().Changed(name) {
			return name
		}
	}
	return ""
}

// cleanLab removes the leftovers of earlier fabrics of namespaces.
func cleanLab(ctx context.Context, e *cli.Env) error {
	removed, err := backend.Cleanup(ctx)
	for _, name := range removed {
		fmt.Fprintf(e.Out, "removed %s\n", name)
	}
	if err != nil {
		return cli.Failed(err, "run the command with sudo; 'ip netns pids NAME' lists a namespace's processes")
	}
	if len(removed) == 0 {
		fmt.Fprintln(e.Out, "earlier runs left nothing")
	}
	return nil
}

func writeLabConfigs(e *cli.Env, o lab.Options, dir string) error {
	files, err := lab.Configs(o)
	if err != nil {
		return cli.Usage(err, "choose a size within the limits")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return cli.Failed(err, "name a writable directory with --write-configs")
	}
	for _, f := range files {
		if err := os.WriteFile(filepath.Join(dir, f.Name), []byte(f.Text), 0o644); err != nil {
			return cli.Failed(err, "name a writable directory with --write-configs")
		}
	}
	fmt.Fprintf(e.Out, "%d files in %s\n", len(files), dir)
	return nil
}

// labPlay has the options of a play.
type labPlay struct {
	runs      int           // number of runs, one after the other
	pace      time.Duration // pause after each step
	timelines bool          // print timelines
	keep      bool          // leave the fabric running
}

// validate rejects values out of range.
func (p labPlay) validate() error {
	if p.pace < 0 {
		return cli.Usage(fmt.Errorf("--pace %s is negative", p.pace), "for example --pace 1s")
	}
	if p.runs < 1 || p.runs > maxLabRuns {
		return cli.Usage(fmt.Errorf("--runs %d is not within 1 to %d", p.runs, maxLabRuns), "for example --runs 5")
	}
	return nil
}

// maxLabRuns limits the memory of the summary.
const maxLabRuns = 10_000

// playLab starts the fabric and plays the scenarios.
func playLab(ctx context.Context, e *cli.Env, o lab.Options, scenarios []*lab.Scenario, play labPlay, show labShow, log *slog.Logger) error {
	defer show.close()
	show.starting()
	started := time.Now()
	fabric, err := lab.Start(ctx, o, log)
	if err != nil {
		return labError(ctx, o, err)
	}
	defer fabric.Close() // also after a panic, because processes in namespaces would outlive this process
	show.started(fabric, time.Since(started))
	met := true
	results := make([][]lab.Result, play.runs)
	for run := range play.runs {
		show.run(run + 1)
		for _, s := range scenarios {
			show.scenario(s)
			ok, err := fabric.Run(ctx, s, func(r lab.Result) {
				if !play.timelines {
					r.Timeline = nil
				}
				results[run] = append(results[run], r)
				show.result(r)
				cli.Wait(ctx, play.pace)
				show.next()
			})
			if err != nil {
				return labError(ctx, o, errors.Join(err, fabric.Close(), logsKept(fabric)))
			}
			met = met && ok
		}
	}
	var summary []lab.Summary
	if play.runs > 1 {
		summary = lab.Summarize(results)
	}
	show.ended(met, summary, lab.SummarizeTransfers(results)) // before the fabric is closed, because the last picture is of a running fabric
	if logs := fabric.Logs(); logs != "" {
		fmt.Fprintf(notes(e), "logs and configurations of all processes are kept in %s\n", logs)
	}
	if play.keep && ctx.Err() == nil {
		lines, err := fabric.Leave()
		for _, line := range lines {
			fmt.Fprintln(notes(e), line)
		}
		if err != nil {
			return labError(ctx, o, err)
		}
	}
	if err := fabric.Close(); err != nil {
		return labError(ctx, o, err)
	}
	if !met {
		return cli.Failed(errors.New("an expectation was not met"), "the steps marked WRONG (\"ok\": false) show the observed state")
	}
	return nil
}

// logsKept returns an error with the path of a failed fabric's logs.
func logsKept(f *lab.Fabric) error {
	if logs := f.Logs(); logs != "" {
		return fmt.Errorf("logs and configurations of all nodes are kept in %s", logs)
	}
	return nil
}

// notes returns the writer of messages for people: standard error if standard output has data.
func notes(e *cli.Env) io.Writer {
	if e.Output == "table" {
		return e.Out
	}
	return e.Err
}

// labError describes the end of a lab that could not play all scenarios.
func labError(ctx context.Context, o lab.Options, err error) error {
	if ctx.Err() != nil {
		return cli.Interrupted()
	}
	remedy := "run the command with --verbose to see the daemons' logs"
	if o.Netns != nil || o.Containerlab != nil {
		remedy = "see the logs of the processes in the folder named above"
	}
	return cli.Failed(err, remedy)
}

// onlyFared replaces the software that a description names for leaves and spines by fared, the only choice in one
// process. Software that a flag names stays, and is refused.
func onlyFared(e *cli.Env, c *cobra.Command, spec *topo.Spec) {
	for _, software := range []struct {
		flag, nodes string
		value       *string
	}{{"leaf", "leaves", &spec.Leaf}, {"spine", "spines", &spec.Spine}} {
		if value := *software.value; value != "" && value != topo.Fared && !c.Flags().Changed(software.flag) {
			*software.value = topo.Fared
			fmt.Fprintf(e.Err, "fared: in a single process the %s run fared instead of %s; with --netns they run %[2]s\n", software.nodes, value)
		}
	}
}
