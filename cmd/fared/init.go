package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/discover"
)

// initOptions are the flags of `fared init`.
type initOptions struct {
	discover.Options
	loopbacks []string
	peers     []string
	file      string
	force     bool
	wait      time.Duration
}

func initCommand(e *cli.Env) *cobra.Command {
	o := &initOptions{}
	c := &cobra.Command{
		Use: "init", Short: "Write the first configuration of this server from its devices, addresses and neighbors", Args: cli.NoArgs,
		Long: `Looks at this machine and writes a configuration with comments that 'fared check' accepts.

Sub-ports are the physical and veth devices that are up, except members of bridges and bonds and
the devices of the default route. The leaf is the other address of a /31 or /30 (IPv6: /127 or
/126), else in a larger subnet the address of --peer, the only gateway of routes over the device or
the only neighbor that the kernel knows (both guesses), else the router that advertises itself on
the device (unnumbered; FRR: neighbor eth0 interface). To find routers the command advertises this host on these devices, as the daemon
does, which needs CAP_NET_RAW.

Planes follow the names of the leaves by LLDP (lldpctl, where lldpd runs), else the subnets of the
leaves' addresses, else the names of the devices: p0s0 and p0s1 are of one plane, and of names
with one number such as eth0 and eth1 two in a row. Loopbacks are the host addresses on lo,
except those with host scope or a limited lifetime, as virtual addresses have.

With --match pci, mac or rdma the sub-ports are p0s0 and so on, and the agent gives these names, as
alternative names, to the devices at these addresses. So a renamed device keeps its sessions.

Values that the machine does not determine are marked "guessed" in the file and listed on standard
error, with the devices that were left out and the loopbacks that no session carries. The last line of standard error has the next command.

An existing file stays, except with --force, which keeps it as FILE.bak.

Exit code 1: no device leads to a leaf, there is no loopback, or the file exists.`,
		Example: "  sudo fared init\n  fared init --output - --planes 4\n  fared init --device eth0,eth1 --loopback 10.255.0.1 --as 4200000001",
		RunE:    func(c *cobra.Command, _ []string) error { return runInit(e, c, o) },
	}
	c.Flags().StringVarP(&o.file, "output", "o", cli.DefaultConfig, "file to write; - is standard output")
	c.Flags().BoolVar(&o.force, "force", false, "replace an existing file, and keep it as FILE.bak")
	c.Flags().Uint32Var(&o.AS, "as", 0, "AS number of this server (default: a private one from the first loopback)")
	c.Flags().StringSliceVar(&o.loopbacks, "loopback", nil, "addresses of the GPUs (default: those of lo)")
	c.Flags().IntVar(&o.Planes, "planes", 0, "number of planes; consecutive devices are of one plane")
	c.Flags().StringSliceVar(&o.Devices, "device", nil, "the sub-ports, of any kind, by a name or an alternative name (default: all devices that lead to a leaf)")
	c.Flags().StringSliceVar(&o.peers, "peer", nil, "leaves' addresses as DEVICE=ADDRESS, for subnets larger than /30 (/126)")
	c.Flags().StringVar(&o.Leaf, "leaf", "", "software of the leaves: frr (and SONiC), bird (and GoBGP) or fared (default: frr, as a guess)")
	c.Flags().StringVar(&o.Match, "match", discover.MatchName, "how the file selects the sub-ports: name, or pci, mac or rdma, which hold when devices are renamed")
	c.Flags().DurationVar(&o.wait, "wait", 5*time.Second, "longest time to wait for router advertisements")
	_ = c.MarkFlagFilename("output", "yaml", "yml")
	_ = c.RegisterFlagCompletionFunc("match", cobra.FixedCompletions(matches, cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("leaf", cobra.FixedCompletions(leaves, cobra.ShellCompDirectiveNoFileComp))
	return c
}

func runInit(e *cli.Env, c *cobra.Command, o *initOptions) error {
	if err := o.parse(); err != nil {
		return err
	}
	if o.file != "-" && !o.force {
		if _, err := os.Lstat(o.file); err == nil {
			return cli.Failed(fmt.Errorf("%s exists", o.file), "replace it with --force, which keeps it as "+o.file+".bak, or name another file with --output")
		}
	}
	machine, err := discover.Read(c.Context(), o.Options, o.wait)
	if err != nil {
		return cli.Failed(err, "")
	}
	plan, err := discover.New(machine, o.Options)
	if err != nil {
		return explainInit(e, err)
	}
	cfg, err := config.Parse(o.file, plan.Text)
	if err != nil {
		return cli.Usage(err, "correct the flags, or the addresses of the machine")
	}
	if err := o.write(e, plan.Text); err != nil {
		return cli.Failed(err, "run the command as root, or use --output -")
	}
	reportInit(e, o, plan, cfg.Warnings())
	return nil
}

// leaves are the values of --leaf.
var leaves = []string{discover.LeafFRR, discover.LeafBIRD, discover.LeafFared}

// matches are the values of --match.
var matches = []string{discover.MatchName, discover.MatchPCI, discover.MatchMAC, discover.MatchRDMA}

// parse checks the flags that have a range, and reads the loopbacks, addresses with or without the length of a host
// prefix.
func (o *initOptions) parse() error {
	if o.Planes < 0 || o.Planes > config.MaxPlanes {
		return cli.Usage(fmt.Errorf("--planes %d is not between 1 and %d", o.Planes, config.MaxPlanes), "omit the flag to derive the planes")
	}
	if o.Leaf != "" && !slices.Contains(leaves, o.Leaf) {
		return cli.Usage(fmt.Errorf("--leaf %q is not known", o.Leaf), "use "+strings.Join(leaves, ", ")+"; for another leaf that one which treats Link Bandwidth alike (/usr/share/doc/fared/operations/leaves.md)")
	}
	if !slices.Contains(matches, o.Match) {
		return cli.Usage(fmt.Errorf("--match %q is not known", o.Match), "use "+strings.Join(matches, ", "))
	}
	if o.wait < 0 {
		return cli.Usage(fmt.Errorf("--wait %v is negative", o.wait), "use 0s to skip routers that advertise themselves")
	}
	for _, text := range o.peers {
		device, address, _ := strings.Cut(text, "=")
		peer, err := netip.ParseAddr(address)
		if err != nil || device == "" {
			return cli.Usage(fmt.Errorf("--peer %q is not a device and an address", text), "for example --peer eth0=10.0.0.254")
		}
		o.Peers = append(o.Peers, discover.Peer{Device: device, Address: peer})
	}
	for _, text := range o.loopbacks {
		address, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimSuffix(text, "/32"), "/128"))
		if err != nil {
			return cli.Usage(fmt.Errorf("--loopback %q is not an address", text), "for example --loopback 10.255.0.1")
		}
		o.Loopbacks = append(o.Loopbacks, netip.PrefixFrom(address, address.BitLen()))
	}
	return nil
}

// explainInit gives an error of the plan its exit code and remedy, after the devices that were left out.
func explainInit(e *cli.Env, err error) error {
	var unusable *discover.UnusableError
	var option *discover.OptionError
	switch {
	case errors.As(err, &unusable):
		printList(e, "left out", unusable.LeftOut)
		return cli.Failed(err, unusable.Remedy)
	case errors.As(err, &option):
		return cli.Usage(err, option.Remedy)
	}
	return err
}

// write writes the file at once, readable by all users, and keeps an existing one as FILE.bak.
func (o *initOptions) write(e *cli.Env, text []byte) error {
	if o.file == "-" {
		_, err := e.Out.Write(text)
		return err
	}
	dir := filepath.Dir(o.file)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	temp, err := os.CreateTemp(dir, ".fared-init-")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name())
	_, err = temp.Write(text)
	if err := errors.Join(err, temp.Chmod(0o644), temp.Sync(), temp.Close()); err != nil {
		return err
	}
	if o.force {
		if err := os.Rename(o.file, o.file+".bak"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return os.Link(temp.Name(), o.file) // fails if another process has created the file meanwhile
}

// reportInit writes to standard error what the file has, what is guessed, and the next commands.
func reportInit(e *cli.Env, o *initOptions, p *discover.Plan, warnings []string) {
	fmt.Fprintf(e.Err, "%s: %s, %s, %s\n", o.file, cli.Several(p.Planes, "plane"), cli.Several(p.SubPorts, "sub-port"), cli.Several(p.Sessions, "session"))
	printList(e, "guessed", p.Guesses)
	printList(e, "left out", p.LeftOut)
	printList(e, "warnings", warnings)
	var next []string
	for _, l := range p.Absent {
		next = append(next, fmt.Sprintf("sudo ip address add %s dev lo", l))
	}
	if o.file != "-" {
		check := "fared check"
		if o.file != cli.DefaultConfig {
			check += " --config " + o.file
		}
		next = append(next, check, "sudo systemctl enable --now fared-dataplane fared")
	}
	printList(e, "next", next)
}

func printList(e *cli.Env, title string, lines []string) {
	if len(lines) > 0 {
		fmt.Fprintf(e.Err, "%s:\n  %s\n", title, strings.Join(lines, "\n  "))
	}
}
