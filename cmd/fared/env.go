package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/rdmaenv"
)

// envOptions are the flags of `fared env`.
type envOptions struct {
	file, config, sysfs, format, interposer string
	source, destination                     string
	noRails, verify                         bool
}

func envCommand(e *cli.Env) *cobra.Command {
	o := &envOptions{}
	c := &cobra.Command{
		Use: "env PROGRAM [--verify -- COMMAND [ARGUMENT ...]]", Short: "Print the environment in which a program uses the planes of this server",
		Long: `Prints the environment variables by which a program uses the RDMA devices of this server: devices
in the order of rail and plane, the index of the loopback's GID, and the interposer that gives
queue pairs the source ports of slots (/usr/share/doc/fared/rdma.md). Comments name what the program cannot follow.
All variables are documented by the program.

PROGRAM is nccl, ucx, nvshmem, mooncake, uccl, mori or deepep, or nccl-net for NCCL with the net
plugin of fared on servers without RDMA devices (/usr/share/doc/fared/nccl.md). A rail is the position of a sub-port
in its plane. Devices come from the slot table, or with --config from a configuration file;
sub-ports without an RDMA device or a GID of the loopback are left out, with a comment.

Formats: export for a shell, docker for --env-file, systemd for a drop-in of a unit, json.

--verify runs COMMAND in the environment, and then writes to standard error how many RoCE packets
left by each plane meanwhile, as counted by the RDMA devices, of all programs. A program that
takes another way, such as TCP, sends none: the exit code is then 1, unless COMMAND has failed.
Otherwise it is that of COMMAND, as with 'fared exec'.`,
		Example: "  eval \"$(fared env nccl)\"\n  fared env nccl-net --config /etc/fared/fared.yaml --format docker\n  fared env ucx --destination 10.255.0.2\n  fared env nvshmem --format docker > nvshmem.env\n  fared env ucx --verify -- ucx_perftest -t tag_bw 10.1.0.1",
		Args: func(c *cobra.Command, args []string) error {
			if o.verify && (len(args) < 2 || c.ArgsLenAtDash() != 1) {
				return cli.Usage(errors.New("--verify needs a program, and a command after --"), "for example: fared env ucx --verify -- ucx_perftest -t tag_bw 10.1.0.1")
			}
			if !o.verify && len(args) != 1 {
				return cli.Usage(errors.New("fared env needs the name of one program"), "use one of "+strings.Join(rdmaenv.Programs(), ", "))
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error { return printEnv(e, o, args[0], args[1:]) },
	}
	slotTableFlag(c, &o.file)
	f := c.Flags()
	f.StringVarP(&o.config, "config", "c", "", "take planes and loopbacks from this configuration file")
	f.StringVar(&o.sysfs, "sysfs", rdmadev.Sysfs, "root of sysfs")
	f.StringVar(&o.format, "format", "export", "export, docker, systemd or json")
	f.StringVar(&o.interposer, "interposer", "", "path of libfared-verbs.so, or none (default: where make install-lib and Debian put it)")
	f.StringVarP(&o.source, "source", "s", "", "the loopback of the program (default: the first of each sub-port)")
	f.StringVarP(&o.destination, "destination", "d", "", "list the source ports toward this destination in comments")
	f.BoolVar(&o.verify, "verify", false, "run a command in the environment, and count the RoCE packets that leave by the planes")
	f.BoolVar(&o.noRails, "no-rails", false, "leave rails and planes out of NCCL_IB_HCA, for NCCL before 2.30")
	_ = c.MarkFlagFilename("config", "yaml", "yml")
	c.MarkFlagsMutuallyExclusive("file", "config")
	c.MarkFlagsMutuallyExclusive("destination", "config")
	c.MarkFlagsMutuallyExclusive("verify", "format")
	c.MarkFlagsMutuallyExclusive("verify", "destination")
	cli.Choices(c, "format", "export", "docker", "systemd", "json")
	c.ValidArgsFunction = cobra.FixedCompletions(rdmaenv.Programs(), cobra.ShellCompDirectiveNoFileComp)
	return c
}

func printEnv(e *cli.Env, o *envOptions, program string, command []string) error {
	if err := cli.OneOf("format", o.format, "export", "docker", "systemd", "json"); err != nil {
		return err
	}
	var source netip.Addr
	if o.source != "" {
		var err error
		if source, err = netip.ParseAddr(o.source); err != nil {
			return cli.Usage(fmt.Errorf("--source %q is not an address", o.source), "'fared slots' lists the loopbacks")
		}
	}
	l, err := readLayout(o.file, o.config)
	if err != nil {
		return err
	}
	if l.from == "" {
		_, err := openSlots("", "")
		return err
	}
	if !rdmaenv.NeedsDevices(program) {
		if o.verify {
			return cli.Usage(fmt.Errorf("%s sends no RoCE packets that --verify could count", program), "NCCL_DEBUG=INFO shows whether NCCL uses the plugin: NET/fared")
		}
		return l.print(e, o, program, rdmaenv.Setup{TCPPorts: l.tcpPorts}, nil)
	}
	report, err := rdmadev.Inspect(o.sysfs, l.subPorts, func(string) rdmadev.Setting { return rdmadev.Unknown })
	if err != nil {
		return cli.Failed(err, "name the root of sysfs with --sysfs")
	}
	devices, omitted := devicesOf(report, len(l.subPorts), source)
	if len(devices) == 0 {
		return cli.Failed(errors.New("no sub-port has an RDMA device with a GID of its loopback"), "'fared rdma' names the faults and their remedies")
	}
	setup := rdmaenv.Setup{Devices: devices, Interposer: findInterposer(o.interposer), Rails: !o.noRails}
	if o.verify {
		for _, note := range omitted {
			fmt.Fprintln(e.Err, "fared env:", note)
		}
		return l.verify(e, o, program, setup, report, command)
	}
	return l.print(e, o, program, setup, omitted)
}

// environment returns the environment of a program.
func (l *layout) environment(program string, setup rdmaenv.Setup) (rdmaenv.Environment, error) {
	result, ok := rdmaenv.Of(program, setup)
	if !ok {
		return result, cli.Usage(fmt.Errorf("program %q is not known", program), "use one of "+strings.Join(rdmaenv.Programs(), ", "))
	}
	if l.table != nil && l.table.Path() != slots.DefaultPath {
		result.Variables = append(result.Variables, rdmaenv.Variable{Name: "FARED_SLOTS", Value: l.table.Path()})
	}
	return result, nil
}

// print prints the environment of a program, after notes.
func (l *layout) print(e *cli.Env, o *envOptions, program string, setup rdmaenv.Setup, notes []string) error {
	result, err := l.environment(program, setup)
	if err != nil {
		return err
	}
	result.Notes = append(notes, result.Notes...)
	ports, err := o.ports(l)
	if err != nil {
		return err
	}
	return (&envView{program, setup.Devices, result, ports}).print(e, o.format)
}

// devicesOf returns the devices of the first n rows of a report by rail, then by plane, and the reasons why others are
// left out. A zero source selects the first loopback of each sub-port.
func devicesOf(report *rdmadev.Report, n int, source netip.Addr) (devices []rdmaenv.Device, omitted []string) {
	var planes []string
	rails := map[string]int{}
	for _, row := range report.Rows[:n] {
		if !slices.Contains(planes, row.Plane) {
			planes = append(planes, row.Plane)
		}
		rail := rails[row.Plane]
		rails[row.Plane]++
		a := source
		if !a.IsValid() && len(row.Loopbacks) > 0 {
			a = row.Loopbacks[0]
		}
		if row.Port == nil {
			omitted = append(omitted, fmt.Sprintf("%s is left out: it has no RDMA device ('fared rdma' names the remedy)", row.Device))
			continue
		}
		if !slices.Contains(row.Loopbacks, a) {
			continue // of another GPU
		}
		gid, ok := row.Port.GIDOf(a, row.Device)
		if !ok {
			omitted = append(omitted, fmt.Sprintf("%s is left out: %s/%d has no GID of %s ('fared rdma' names the remedy)", row.Device, row.Port.Device, row.Port.Port, a))
			continue
		}
		d := rdmaenv.Device{Name: row.Port.Device, Driver: row.Status.Driver, Port: row.Port.Port, Rail: rail, Plane: slices.Index(planes, row.Plane), Source: a, GID: gid}
		for _, g := range row.Port.GIDs {
			if g.Type == rdmadev.RoCEv2 && g.Address != a {
				d.Others = append(d.Others, g.Address)
			}
		}
		if i := slices.IndexFunc(devices, func(o rdmaenv.Device) bool { return o.Name == d.Name && o.Port == d.Port }); i >= 0 {
			devices[i].Plane = -1
			omitted = append(omitted, fmt.Sprintf("%s is left out: %s/%d is in the list for another plane", row.Device, d.Name, d.Port))
			continue
		}
		devices = append(devices, d)
	}
	slices.SortStableFunc(devices, func(a, b rdmaenv.Device) int {
		return cmp.Or(cmp.Compare(a.Rail, b.Rail), cmp.Compare(a.Plane, b.Plane))
	})
	return devices, omitted
}

// findInterposer returns the path of the interposer, or "" if there is none.
func findInterposer(named string) string {
	if named == "none" {
		return ""
	}
	if named != "" {
		return named
	}
	for _, pattern := range []string{"/usr/local/lib", "/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib"} {
		found, err := filepath.Glob(filepath.Join(pattern, "libfared-verbs.so"))
		if err == nil && len(found) > 0 {
			return found[0]
		}
	}
	return ""
}

// ports describes the source ports of every pair of the destination, by plane.
func (o *envOptions) ports(l *layout) (lines []string, err error) {
	if o.destination == "" {
		return nil, nil
	}
	destination, err := netip.ParseAddr(o.destination)
	if err != nil {
		return nil, cli.Usage(fmt.Errorf("--destination %q is not an address", o.destination), "'fared slots' lists the destinations")
	}
	for _, source := range l.table.Sources() {
		p, err := l.table.Lookup(source, destination, nil)
		if errors.Is(err, slots.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, explainSlots(err)
		}
		if o.source != "" && source.String() != o.source {
			continue
		}
		for plane, name := range l.table.Planes() {
			var list []string
			for _, s := range p.Slots {
				if s.Plane == plane && !s.Parked {
					list = append(list, fmt.Sprint(s.SourcePort))
				}
			}
			lines = append(lines, fmt.Sprintf("%s to %s by %s: source ports %s", source, destination, name, cmp.Or(strings.Join(list, " "), "none")))
		}
	}
	if len(lines) == 0 {
		return nil, cli.NotFound(fmt.Errorf("the slot table has no pair to %s", destination), "'fared slots' lists the pairs")
	}
	return lines, nil
}

// envView is the output of `fared env --format json`.
type envView struct {
	Program string           `json:"program"`
	Devices []rdmaenv.Device `json:"devices"`
	rdmaenv.Environment
	Ports []string `json:"ports,omitempty"`
}

func (v *envView) print(e *cli.Env, format string) error {
	if format == "json" {
		text, err := json.Marshal(v)
		if err != nil {
			return err
		}
		return cli.PrintJSON(e.Out, "json", text)
	}
	var b strings.Builder
	for _, note := range slices.Concat(v.Notes, v.Ports) {
		fmt.Fprintf(&b, "# %s\n", note)
	}
	if format == "systemd" {
		b.WriteString("[Service]\n")
	}
	for _, x := range v.Variables {
		switch format {
		case "export":
			fmt.Fprintf(&b, "export %s=%s\n", x.Name, shellQuote(x.Value))
		case "docker":
			fmt.Fprintf(&b, "%s=%s\n", x.Name, x.Value)
		case "systemd": // systemd.exec(5): % begins a specifier
			fmt.Fprintf(&b, "Environment=\"%s=%s\"\n", x.Name, strings.NewReplacer(`\`, `\\`, `"`, `\"`, "%", "%%").Replace(x.Value))
		}
	}
	_, err := e.Out.Write([]byte(b.String()))
	return err
}

// shellQuote quotes a word for a shell if it needs quotes, for zsh also a word that begins with = (the path of a
// program).
func shellQuote(s string) string {
	if strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+:,./@") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
