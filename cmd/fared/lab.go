package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/lab"
)

func labCommand(e *env) *cobra.Command {
	var o lab.Options
	var scenario, script, speed, configs string
	var verbose bool
	c := &cobra.Command{
		Use: "lab", Short: "Watch weights follow failures in a fabric of real BGP sessions inside this process", Args: cobra.NoArgs,
		Long: `Starts leaves and GPU servers with real BGP sessions on 127.0.0.0/8 and in-memory data
planes, plays a scenario of failures, and checks after each step that every pair of GPUs
has exactly the weights it should. No root, no configuration.

Scenarios: ` + strings.Join(lab.Names(), ", ") + `, all; or a script of your own.
Exit code 1 when an expectation is not met.`,
		Example: "  fared lab\n  fared lab --scenario sub-cable -o json\n  fared lab --servers 64 --scenario leaf\n  fared lab --script story.txt",
		RunE: func(c *cobra.Command, _ []string) error {
			var err error
			if o.Speed, err = fare.ParseBandwidth(speed); err != nil {
				return &exitError{exitUsage, fmt.Errorf("--speed: %w", err), "for example --speed 400G"}
			}
			scenarios, err := lab.Load(scenario)
			if err != nil {
				return &exitError{exitUsage, err, ""}
			}
			if script != "" {
				f, err := os.Open(script)
				if err != nil {
					return &exitError{exitUsage, err, "name a file with --script"}
				}
				defer f.Close()
				s, err := lab.Parse(filepath.Base(script), f)
				if err != nil {
					return &exitError{exitUsage, err, "'fared lab --help' and docs/labs.md say what a script looks like"}
				}
				scenarios = []*lab.Scenario{s}
			}
			if configs != "" {
				return e.writeLabConfigs(o, configs)
			}
			log := slog.New(slog.DiscardHandler)
			if verbose {
				log = newLogger(e.err, "text", slog.LevelInfo)
			}
			return e.playLab(c, o, scenarios, log)
		},
	}
	f := c.Flags()
	f.StringVar(&scenario, "scenario", "all", strings.Join(lab.Names(), ", ")+" or all")
	f.StringVar(&script, "script", "", "a file with a scenario, instead of a built-in one")
	f.IntVar(&o.Planes, "planes", 4, "planes, each with one leaf")
	f.IntVar(&o.Servers, "servers", 8, "GPU servers")
	f.IntVar(&o.GPUs, "gpus", 1, "GPUs of a server")
	f.IntVar(&o.SubPorts, "sub-ports", 2, "sub-ports of a server in each plane: 2 is a Y-cable")
	f.StringVar(&speed, "speed", "400G", "speed of a sub-port")
	f.StringVar(&o.Mode, "mode", "per-flow", "per-flow or per-packet")
	f.StringVar(&o.Policy, "policy", "reweight", "what becomes of a failed plane's slots: reweight or remap")
	f.StringVar(&o.Ordering, "ordering", "weak", "weak, partial or strong")
	f.BoolVar(&o.IPv6, "ipv6", false, "give every GPU an IPv6 loopback too")
	f.BoolVarP(&verbose, "verbose", "v", false, "log what the daemons do, to standard error")
	f.StringVar(&configs, "write-configs", "", "only write every node's configuration file into this directory")
	_ = c.RegisterFlagCompletionFunc("scenario", cobra.FixedCompletions(append(lab.Names(), "all"), cobra.ShellCompDirectiveNoFileComp))
	c.MarkFlagsMutuallyExclusive("scenario", "script")
	return readFlags(e, c)
}

func (e *env) writeLabConfigs(o lab.Options, dir string) error {
	files, err := lab.Configs(o)
	if err != nil {
		return &exitError{exitUsage, err, ""}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return &exitError{code: exitFailed, err: err}
	}
	for _, f := range files {
		if err := os.WriteFile(filepath.Join(dir, f.Name), []byte(f.Text), 0o644); err != nil {
			return &exitError{code: exitFailed, err: err}
		}
	}
	fmt.Fprintf(e.out, "%d files in %s\n", len(files), dir)
	return nil
}

// playLab starts the fabric and plays the scenarios one after the other.
func (e *env) playLab(c *cobra.Command, o lab.Options, scenarios []*lab.Scenario, log *slog.Logger) error {
	show := newLabShow(e, o)
	show.starting()
	started := time.Now()
	fabric, err := lab.Start(c.Context(), o, log)
	if err != nil {
		return &exitError{exitFailed, err, "run it with --verbose to see what the daemons say"}
	}
	show.started(fabric, time.Since(started))
	met, played := true, 0
	for _, s := range scenarios {
		show.scenario(s)
		ok, err := fabric.Run(c.Context(), s, func(r lab.Result) { played++; show.result(r) })
		if err != nil {
			fabric.Close()
			return &exitError{exitFailed, err, ""}
		}
		met = met && ok
	}
	if err := fabric.Close(); err != nil {
		return &exitError{code: exitFailed, err: err}
	}
	show.ended(played, met)
	if !met {
		return &exitError{code: exitFailed, err: fmt.Errorf("an expectation was not met")}
	}
	return nil
}

// labShow prints a lab's progress: lines of text, or one JSON object (or YAML document) a step. In a terminal every line
// appears as its step begins and is completed in place.
type labShow struct {
	e    *env
	o    lab.Options
	live bool
	bold func(string) string
}

func newLabShow(e *env, o lab.Options) *labShow {
	s := &labShow{e: e, o: o, bold: func(t string) string { return t }}
	if f, ok := e.out.(*os.File); ok && e.output == "table" && term.IsTerminal(int(f.Fd())) {
		s.live = true
		s.bold = func(t string) string { return "\x1b[1m" + t + "\x1b[0m" }
	}
	return s
}

func (s *labShow) text() io.Writer {
	if s.e.output == "table" {
		return s.e.out
	}
	return io.Discard
}

func (s *labShow) starting() {
	fmt.Fprintf(s.text(), "%d planes, %d servers with %d GPU each, %d sub-ports of %s in every plane\n", s.o.Planes, s.o.Servers, s.o.GPUs, s.o.SubPorts, s.o.Speed)
}

func (s *labShow) started(f *lab.Fabric, took time.Duration) {
	fmt.Fprintf(s.text(), "%d BGP sessions established, every weight in effect after %s\n", f.Sessions(), took.Round(time.Millisecond))
}

func (s *labShow) scenario(sc *lab.Scenario) {
	fmt.Fprintf(s.text(), "\n%s\n", s.bold(sc.Name+": "+sc.Title))
}

func (s *labShow) result(r lab.Result) {
	if s.e.output != "table" {
		b, err := json.Marshal(r)
		if err == nil && s.e.output == "json" {
			fmt.Fprintf(s.e.out, "%s\n", b)
		} else if err == nil {
			fmt.Fprintln(s.e.out, "---")
			_ = printJSON(s.e.out, "yaml", b)
		}
		return
	}
	mark := "ok   "
	if !r.OK {
		mark = "WRONG"
	}
	if s.live {
		color := "\x1b[32m"
		if !r.OK {
			color = "\x1b[31m"
		}
		mark = color + mark + "\x1b[0m"
	}
	fmt.Fprintf(s.e.out, "  %s %-62s %s -> %s  %s\n", mark, r.Step, r.Source, r.Destination, s.bars(r.Weights))
	fmt.Fprintf(s.e.out, "        %d pairs as they should be after %s, %d slots moved\n", r.Pairs-len(r.Wrong), time.Duration(r.ElapsedNS).Round(10*time.Microsecond), r.SlotsMoved)
	for _, w := range r.Wrong {
		fmt.Fprintf(s.e.out, "        %s\n", w)
	}
}

// bars draws weights: 2:2:1:2 and a bar for every plane, as long as its share.
func (s *labShow) bars(weights map[string]uint32) string {
	var list []string
	var drawn []string
	var top uint32
	for p := range s.o.Planes {
		top = max(top, weights[fmt.Sprintf("p%d", p)])
	}
	const width = 8
	for p := range s.o.Planes {
		w := weights[fmt.Sprintf("p%d", p)]
		list = append(list, fmt.Sprint(w))
		n := 0
		if top > 0 {
			n = int(w * width / top)
		}
		drawn = append(drawn, strings.Repeat("█", n)+strings.Repeat("·", width-n))
	}
	return fmt.Sprintf("%-9s %s", strings.Join(list, ":"), strings.Join(drawn, " "))
}

func (s *labShow) ended(steps int, met bool) {
	verdict := "every expectation met"
	if !met {
		verdict = "NOT every expectation met"
	}
	fmt.Fprintf(s.text(), "\n%d steps, %s\n", steps, s.bold(verdict))
}
