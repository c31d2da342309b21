package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon"
	"github.com/fared/fared/daemon/config"
)

// stdinName represents the standard input in messages about a configuration.
const stdinName = "<stdin>"

func checkCommand(e *cli.Env) *cobra.Command {
	var file string
	var host bool
	c := &cobra.Command{
		Use: "check [FILE]", Short: "Check a configuration file; exit 0, or 2 with every error",
		Long: `Checks a configuration file, or with "-" the standard input, as the daemon would at its start.
Relative names in the standard input are relative to this directory.

With -o json or yaml the standard output has the result also of an invalid file: valid, errors
(file, line, column, path, message, remedy), warnings, and the numbers of planes, sub-ports,
sessions and loopbacks. The exit code is the same.`,
		Example: "  fared check\n  fared check new.yaml\n  ssh host cat /etc/fared/fared.yaml | fared check - -o json",
		Args: func(c *cobra.Command, args []string) error {
			switch {
			case len(args) > 1:
				return cli.Usage(fmt.Errorf("check takes one file, not %d", len(args)), "see fared check --help")
			case len(args) == 1 && c.Flags().Changed("config"):
				return cli.Usage(errors.New("check takes a file or --config, not both"), "leave out --config")
			}
			return nil
		},
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return []cobra.Completion{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) == 1 {
				file = args[0]
			}
			if !host {
				return runCheck(e, file)
			}
			cfg, unread, name, err := inspectConfig(e, file)
			if err != nil {
				return invalidConfig(e, name, err)
			}
			x := &examination{Passed: []string{}, Skipped: []string{}, Findings: []finding{}}
			x.valid(name, cfg, unread)
			return showExamination(e, x)
		},
	}
	cli.ConfigFlag(c, &file)
	c.Flags().BoolVar(&host, "host", false, "examine this machine for the configuration too; exit 1 with findings ('fared doctor' adds the daemon)")
	return cli.ReadFlags(e, c)
}

// checked is the result of `fared check` for programs.
type checked struct {
	File         string        `json:"file"`
	Valid        bool          `json:"valid"`
	Errors       []configFault `json:"errors,omitempty"`
	Warnings     []string      `json:"warnings,omitempty"`
	Role         string        `json:"role,omitempty"`
	Planes       int           `json:"planes,omitempty"`
	SubPorts     int           `json:"sub_ports,omitempty"`
	Sessions     int           `json:"sessions,omitempty"`
	Loopbacks    int           `json:"loopbacks,omitempty"`
	SourceGroups int           `json:"source_groups,omitempty"`
}

// configFault is one mistake in a configuration for programs.
type configFault struct {
	File    string `json:"file,omitempty"`
	Line    int    `json:"line,omitempty"` // from 1, as Column
	Column  int    `json:"column,omitempty"`
	Path    string `json:"path,omitempty"`
	Message string `json:"message"`
	Remedy  string `json:"remedy,omitempty"`
}

// runCheck checks a configuration file, "-" for the standard input, and prints the result.
func runCheck(e *cli.Env, file string) error {
	cfg, unread, file, err := inspectConfig(e, file)
	if err != nil {
		return invalidConfig(e, file, err)
	}
	result := checked{File: file, Valid: true}
	result.describe(cfg, unread)
	if e.Output != "table" {
		return printChecked(e, &result)
	}
	for _, text := range result.Warnings {
		if _, err := fmt.Fprintf(e.Err, "warning: %s: %s\n", file, text); err != nil {
			return err
		}
	}
	loopbacks := cli.Several(result.Loopbacks, "loopback")
	if result.SourceGroups > 1 {
		loopbacks += fmt.Sprintf(" in %d source groups", result.SourceGroups)
	}
	_, err = fmt.Fprintf(e.Out, "%s: a %s with %s, %s, %s, %s\n", file, result.Role, cli.Several(result.Planes, "plane"), cli.Several(result.SubPorts, "sub-port"),
		cli.Several(result.Sessions, "session"), loopbacks)
	return err
}

// inspectConfig reads and checks a configuration file, "-" for the standard input. It returns the file's name for
// messages, and the credentials that only the unit can read.
func inspectConfig(e *cli.Env, file string) (cfg *config.Config, unread []string, name string, err error) {
	if file == "-" {
		name = stdinName
		cfg, unread, err = config.InspectFrom(name, e.In)
	} else {
		name = file
		cfg, unread, err = config.Inspect(name)
	}
	if err != nil {
		return nil, nil, name, cli.ConfigError(err)
	}
	if cfg.Dataplane.Address == config.InsideDataplane {
		if _, wrong := insideConfig(cfg.Dataplane.Flags, slog.New(slog.DiscardHandler)); wrong != nil {
			return nil, nil, name, cli.Usage(fmt.Errorf("%s: %w", name, wrong), insideRemedy)
		}
	}
	return cfg, unread, name, nil
}

// invalidConfig returns the error of an invalid file; with -o json or yaml it prints the mistakes before.
func invalidConfig(e *cli.Env, file string, err error) error {
	if e.Output != "table" {
		result := checked{File: file}
		result.blame(err)
		if wrong := printChecked(e, &result); wrong != nil {
			return wrong
		}
	}
	return err
}

func printChecked(e *cli.Env, result *checked) error {
	text, err := json.Marshal(result)
	if err != nil {
		return err
	}
	return cli.PrintJSON(e.Out, e.Output, text)
}

// describe fills in the result for a valid configuration; unread are its credentials that only the unit can read.
func (r *checked) describe(cfg *config.Config, unread []string) {
	for _, name := range unread {
		r.Warnings = append(r.Warnings, fmt.Sprintf("credential %s is not checked: only the systemd unit can read it", name))
	}
	r.Warnings = append(r.Warnings, cfg.Warnings()...)
	if err := daemon.CheckKernel(cfg); err != nil {
		r.Warnings = append(r.Warnings, fmt.Sprintf("not on this machine: %v", err))
	}
	r.Role, r.Planes, r.Loopbacks, r.SourceGroups = cfg.Role.String(), len(cfg.Planes), len(cfg.Loopbacks), len(cfg.SourceGroups())
	for _, p := range cfg.Planes {
		r.SubPorts += len(p.SubPorts)
		for _, sp := range p.SubPorts {
			r.Sessions += len(sp.Sessions)
		}
	}
}

// blame fills in the mistakes.
func (r *checked) blame(err error) {
	var list config.Errors
	if !errors.As(err, &list) {
		fault := configFault{Message: err.Error()}
		var coded *cli.Error
		if errors.As(err, &coded) {
			fault.Remedy = coded.Remedy
		}
		r.Errors = []configFault{fault}
		return
	}
	for _, x := range list {
		r.Errors = append(r.Errors, configFault{x.File, x.Line, x.Column, x.Path, x.Wrong, x.Right})
	}
}
