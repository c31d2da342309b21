package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/fared/fared/daemon"
	"github.com/fared/fared/daemon/config"
)

// stdinName represents the standard input in messages about a configuration.
const stdinName = "<stdin>"

func checkCommand(e *env) *cobra.Command {
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
				return &exitError{exitUsage, fmt.Errorf("check takes one file, not %d", len(args)), "see fared check --help"}
			case len(args) == 1 && c.Flags().Changed("config"):
				return &exitError{exitUsage, errors.New("check takes a file or --config, not both"), "leave out --config"}
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
				return e.check(file)
			}
			cfg, unread, name, err := e.inspect(file)
			if err != nil {
				return e.invalid(name, err)
			}
			x := &examination{Passed: []string{}, Skipped: []string{}, Findings: []finding{}}
			x.valid(name, cfg, unread)
			return e.showExamination(x)
		},
	}
	configFlag(c, &file)
	c.Flags().BoolVar(&host, "host", false, "examine this machine for the configuration too; exit 1 with findings ('fared doctor' adds the daemon)")
	return readFlags(e, c)
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

// check checks a configuration file, "-" for the standard input, and prints the result.
func (e *env) check(file string) error {
	cfg, unread, file, err := e.inspect(file)
	if err != nil {
		return e.invalid(file, err)
	}
	result := checked{File: file, Valid: true}
	result.describe(cfg, unread)
	if e.output != "table" {
		return e.printChecked(&result)
	}
	for _, text := range result.Warnings {
		if _, err := fmt.Fprintf(e.err, "warning: %s: %s\n", file, text); err != nil {
			return err
		}
	}
	loopbacks := several(result.Loopbacks, "loopback")
	if result.SourceGroups > 1 {
		loopbacks += fmt.Sprintf(" in %d source groups", result.SourceGroups)
	}
	_, err = fmt.Fprintf(e.out, "%s: a %s with %s, %s, %s, %s\n", file, result.Role, several(result.Planes, "plane"), several(result.SubPorts, "sub-port"),
		several(result.Sessions, "session"), loopbacks)
	return err
}

// inspect reads and checks a configuration file, "-" for the standard input. It returns the file's name for messages, and the credentials that only the unit
// can read.
func (e *env) inspect(file string) (cfg *config.Config, unread []string, name string, err error) {
	if file == "-" {
		name = stdinName
		cfg, unread, err = config.InspectFrom(name, e.in)
	} else {
		name = file
		cfg, unread, err = config.Inspect(name)
	}
	if err != nil {
		return nil, nil, name, configError(err)
	}
	if cfg.Dataplane.Address == config.InsideDataplane {
		if _, wrong := insideConfig(cfg.Dataplane.Flags, slog.New(slog.DiscardHandler)); wrong != nil {
			return nil, nil, name, &exitError{exitUsage, fmt.Errorf("%s: %w", name, wrong), insideRemedy}
		}
	}
	return cfg, unread, name, nil
}

// invalid returns the error of an invalid file; with -o json or yaml it prints the mistakes before.
func (e *env) invalid(file string, err error) error {
	if e.output != "table" {
		result := checked{File: file}
		result.blame(err)
		if wrong := e.printChecked(&result); wrong != nil {
			return wrong
		}
	}
	return err
}

func (e *env) printChecked(result *checked) error {
	text, err := json.Marshal(result)
	if err != nil {
		return err
	}
	return printJSON(e.out, e.output, text)
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
		var coded *exitError
		if errors.As(err, &coded) {
			fault.Remedy = coded.remedy
		}
		r.Errors = []configFault{fault}
		return
	}
	for _, x := range list {
		r.Errors = append(r.Errors, configFault{x.File, x.Line, x.Column, x.Path, x.Wrong, x.Right})
	}
}
