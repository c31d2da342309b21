package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/dataplane/bpf"
	"github.com/fared/fared/internal/devmatch"
	"github.com/fared/fared/internal/hostcheck"
	"github.com/fared/fared/internal/rtnl"
)

// examination is the answer of `fared doctor` and `fared check --host`.
type examination struct {
	// Passed are the parts without a finding, and Skipped those that could not be examined, with the reason.
	Passed   []string  `json:"passed"`
	Skipped  []string  `json:"skipped"`
	Findings []finding `json:"findings"`
}

func doctorCommand(e *cli.Env) *cobra.Command {
	var file string
	c := cli.ReadFlags(e, &cobra.Command{
		Use: "doctor", Short: "Examine configuration, host and daemon at once; exit 0, or 1 with every finding and its remedy", Args: cli.NoArgs,
		Long: `Examines this machine before and after the installation: the configuration file as 'fared check',
the devices, addresses, MTUs, reverse path filters, firewall and network managers that it depends
on, and the running daemon as 'fared health'. It changes nothing.

Root is needed for the firewall. Sub-ports in other network namespaces are not examined.`,
		Example: "  sudo fared doctor\n  sudo fared doctor --config new.yaml -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			x := &examination{Passed: []string{}, Skipped: []string{}, Findings: []finding{}}
			x.configuration(e, file)
			x.daemon(c.Context(), e)
			return showExamination(e, x)
		},
	})
	cli.ConfigFlag(c, &file)
	return c
}

// configuration examines a file, and the host for it.
func (x *examination) configuration(e *cli.Env, file string) {
	cfg, unread, name, err := inspectConfig(e, file)
	if err != nil {
		first, rest, _ := strings.Cut(err.Error(), "\n")
		if rest != "" {
			first += " ..."
		}
		x.Findings = append(x.Findings, finding{levelUnhealthy, "the configuration: " + first, "'fared check' has every error; 'fared init' writes a file for this machine"})
		x.Skipped = append(x.Skipped, "host: without a configuration it is unknown what to look for")
		return
	}
	x.valid(name, cfg, unread)
}

// valid examines the host for a valid configuration; unread are its credentials that only the unit can read.
func (x *examination) valid(file string, cfg *config.Config, unread []string) {
	x.Passed = append(x.Passed, "configuration "+file)
	var c checked
	c.describe(cfg, unread)
	for _, text := range c.Warnings {
		x.Findings = append(x.Findings, finding{levelNote, text, "see " + file})
	}
	x.host(cfg)
}

// host examines the machine for a configuration.
func (x *examination) host(cfg *config.Config) {
	u, matched, unmatched, err := useOf(cfg)
	if err != nil {
		x.Skipped = append(x.Skipped, fmt.Sprintf("host: %v", err))
		return
	}
	x.Passed = append(x.Passed, matched...)
	found, err := hostcheck.Machine(u)
	found = append(unmatched, found...)
	if err != nil {
		x.Skipped = append(x.Skipped, fmt.Sprintf("part of the host: %v", err))
	}
	for _, f := range found {
		if f.Reason == hostcheck.ReasonFirewallBFD && cfg.BFD.Interval == 0 {
			continue
		}
		x.Findings = append(x.Findings, finding{levelDegraded, f.Text, f.Remedy})
	}
	for _, f := range hostcheck.Notes() {
		x.Findings = append(x.Findings, finding{levelNote, f.Text, f.Remedy})
	}
	if len(found) == 0 && err == nil {
		x.Passed = append(x.Passed, "host: devices, addresses, MTUs, reverse path filters, firewall, network managers")
	}
}

// daemon adds the findings of fared health.
func (x *examination) daemon(ctx context.Context, e *cli.Env) {
	report, err := askHealth(ctx, e, nil)
	var failed *cli.Error
	switch {
	case errors.As(err, &failed):
		x.Findings = append(x.Findings, finding{levelUnhealthy, fmt.Sprintf("the daemon: %v", failed.Err), failed.Remedy})
	case err != nil:
		x.Findings = append(x.Findings, finding{levelUnhealthy, fmt.Sprintf("the daemon: %v", err), "see fared status"})
	default:
		if report.State == levelHealthy {
			x.Passed = append(x.Passed, fmt.Sprintf("daemon: %s planes up, %s sessions established, %s destinations reachable", report.Planes, report.Sessions, report.Destinations))
		}
		for _, f := range report.Findings {
			if !slices.ContainsFunc(x.Findings, func(known finding) bool { return known.What == f.What }) { // the agent finds the same in the host
				x.Findings = append(x.Findings, f)
			}
		}
	}
}

// useOf returns what a configuration expects of this network namespace, with the devices that matches select under
// their present names; and the matches that select one, and those that do not.
func useOf(cfg *config.Config) (u *hostcheck.Use, matched []string, unmatched []hostcheck.Finding, err error) {
	u = &hostcheck.Use{SteeringAlias: bpf.AnchorAlias, Local: map[string][]netip.Addr{}, Addresses: cfg.Loopbacks}
	devices, err := hardware()
	if err != nil {
		return nil, nil, nil, err
	}
	u.UDPPorts, u.TCPPorts = cfg.Dataplane.UDPPorts, cfg.Dataplane.TCPPorts
	var subPorts []config.SubPort
	var selected []devmatch.SubPort
	for _, p := range cfg.Planes {
		for _, sp := range p.SubPorts {
			if m, err := sp.Selects(); err == nil && sp.Netns == "" {
				subPorts, selected = append(subPorts, sp), append(selected, devmatch.SubPort{Name: sp.Device, Match: m})
			}
		}
	}
	for i, found := range devmatch.Assign(devmatch.Sysfs, selected, devices) {
		device := selected[i].Name
		var not *devmatch.NotOneError
		if errors.As(found.Err, &not) { // as the agent reports it
			unmatched = append(unmatched, hostcheck.Finding{Reason: hostcheck.ReasonDevice, Text: "sub-port " + device + ": " + not.Reason, Remedy: not.Remedy})
			continue
		}
		if m := selected[i].Match; !m.IsZero() {
			matched = append(matched, fmt.Sprintf("sub-port %s: device %s (%s)", device, devices[found.At].Name, m))
			device = devices[found.At].Name
		}
		u.Devices = append(u.Devices, device)
		for _, s := range subPorts[i].Sessions {
			v6 := s.Unnumbered || s.Peer.Is6()
			u.NextHops[0], u.NextHops[1] = u.NextHops[0] || !v6, u.NextHops[1] || v6
			if s.Local.IsValid() {
				u.Local[device] = append(u.Local[device], s.Local)
			}
		}
	}
	for _, l := range cfg.Loopbacks {
		u.Loopbacks[0], u.Loopbacks[1] = u.Loopbacks[0] || l.Addr().Is4(), u.Loopbacks[1] || l.Addr().Is6()
	}
	return u, matched, unmatched, nil
}

// hardware returns the devices of this network namespace.
func hardware() ([]rtnl.Hardware, error) {
	conn, err := rtnl.Dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.Hardware()
}

func showExamination(e *cli.Env, x *examination) error {
	bad := 0
	for _, f := range x.Findings {
		if f.Level != levelNote {
			bad++
		}
	}
	var err error
	if e.Output == "table" {
		w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
		for _, text := range x.Passed {
			cli.Row(w, "ok", text)
		}
		for _, text := range x.Skipped {
			cli.Row(w, "skipped", text)
		}
		for _, f := range x.Findings {
			cli.Row(w, f.Level, f.What)
			cli.Row(w, "", f.Remedy)
		}
		err = w.Flush()
	} else {
		var compact []byte
		if compact, err = json.Marshal(x); err == nil {
			err = cli.PrintJSON(e.Out, e.Output, compact)
		}
	}
	if err == nil && bad > 0 {
		err = cli.Failed(fmt.Errorf("%s", cli.Several(bad, "finding")), "each has its remedy above")
	}
	return err
}

// askHealth asks the daemon, and judges its answers.
func askHealth(ctx context.Context, e *cli.Env, expectations []expectation) (*healthReport, error) {
	conn, err := e.Dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	fabric := farev1.NewFabricServiceClient(conn)
	st, err := fabric.GetStatus(ctx, &farev1.GetStatusRequest{})
	if err != nil {
		return nil, e.Explain(err, "see fared health --help")
	}
	planes, err := fabric.ListPlanes(ctx, &farev1.ListPlanesRequest{})
	if err != nil {
		return nil, e.Explain(err, "see fared health --help")
	}
	sessions, err := fabric.ListSessions(ctx, &farev1.ListSessionsRequest{})
	if err != nil {
		return nil, e.Explain(err, "see fared health --help")
	}
	return judgeHealth(st, planes.Planes, sessions.Sessions, expectations), nil
}
