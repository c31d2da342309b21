package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/topo"
)

func topoCommand(e *cli.Env) *cobra.Command {
	c := &cobra.Command{
		Use: "topo", Short: "Describe a fabric in a few lines, and generate configurations and drawings from it",
		Long: `A fabric is described by a short file, by flags, or by both: flags win. From the description,
fared derives the configuration of every server, leaf and spine, addresses and AS numbers,
cabling tables, drawings, network namespaces and containerlab files, the same on every machine.

  fared topo show --example figure1
  fared topo draw --planes 4 --servers 8 --out fabric.svg
  fared topo generate fabric.yaml --out fabric --for containerlab

Examples to start from: ` + strings.Join(topo.Examples(), ", ") + `. /usr/share/doc/fared/topo.md describes the keys of a file.`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return cli.Usage(fmt.Errorf("unknown command %q", "topo "+args[0]), "see fared topo --help")
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(topoGenerateCommand(e), topoShowCommand(e), topoDrawCommand(e), topoCheckCommand(e), simulateCommand(e))
	return c
}

// fabricArgs describe a fabric on the command line: a file or an example, and flags.
type fabricArgs struct {
	example string
	given   []setting
}

type setting struct {
	key   topo.Key
	value string
}

// addFabricArgs gives a command the argument FILE, --example, and a flag for each key of a file.
func addFabricArgs(c *cobra.Command) *fabricArgs {
	a := &fabricArgs{}
	c.Use += " [FILE]"
	c.Args = func(c *cobra.Command, args []string) error {
		if len(args) > 1 {
			return cli.Usage(fmt.Errorf("%s takes one file, but got %q too", c.CommandPath(), args[1]), "see "+c.CommandPath()+" --help")
		}
		return nil
	}
	c.ValidArgsFunction = completeYAML
	c.Flags().SortFlags = false
	c.Flags().StringVar(&a.example, "example", "", "a built-in fabric, instead of a file: "+strings.Join(topo.Examples(), ", "))
	cli.Choices(c, "example", topo.Examples()...)
	for _, k := range topo.Keys() {
		flag, usage := strings.ReplaceAll(k.Name, "_", "-"), k.Usage
		if k.Words != nil {
			usage += ": " + strings.Join(k.Words, ", ")
		}
		c.Flags().Var(&fabricFlag{a, k}, flag, usage)
		c.Flags().Lookup(flag).DefValue = k.Default()
		if k.Words != nil {
			cli.Choices(c, flag, k.Words...)
		}
	}
	return a
}

// completeYAML completes names of YAML files.
func completeYAML(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return []cobra.Completion{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
}

// fabricFlag is the flag of a key.
type fabricFlag struct {
	args *fabricArgs
	key  topo.Key
}

func (f *fabricFlag) String() string { return "" }

func (f *fabricFlag) Type() string { return f.key.Kind() }

func (f *fabricFlag) Set(value string) error {
	var p topo.Problem
	if err := f.key.Set(&topo.Spec{}, value); errors.As(err, &p) {
		return fmt.Errorf("%s; %s", p.Text, p.Remedy)
	}
	f.args.given = append(f.args.given, setting{f.key, value})
	return nil
}

// load builds the fabric.
func (a *fabricArgs) load(args []string) (*topo.Fabric, error) {
	spec, err := a.spec(args)
	if err != nil {
		return nil, err
	}
	f, err := topo.New(spec)
	if err != nil {
		return nil, cli.Usage(err, "keys of a file are flags too, with dashes for underscores: /usr/share/doc/fared/topo.md")
	}
	return f, nil
}

// spec returns the description, without defaults.
func (a *fabricArgs) spec(args []string) (spec topo.Spec, err error) {
	switch {
	case len(args) > 0 && a.example != "":
		err = cli.Usage(fmt.Errorf("both the file %s and --example %s", args[0], a.example), "use only one of them")
	case len(args) > 0:
		spec, err = readFabric(args[0])
	case a.example != "":
		var text []byte
		if text, err = topo.Example(a.example); err != nil {
			err = cli.Usage(fmt.Errorf("--example: %w", err), "or describe a fabric in a file: /usr/share/doc/fared/topo.md")
		} else {
			spec, err = topo.Parse(a.example+".yaml", text)
		}
	}
	for _, s := range a.given {
		err = errors.Join(err, s.key.Set(&spec, s.value))
	}
	return spec, err
}

// readFabric reads a fabric's file.
func readFabric(name string) (topo.Spec, error) {
	file, err := os.Open(name)
	if err != nil {
		return topo.Spec{}, cli.Usage(err, "name a file that describes a fabric, or see --example")
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, topo.MaxFileSize+1))
	if err != nil {
		return topo.Spec{}, cli.Usage(err, "name a file that describes a fabric, or see --example")
	}
	spec, err := topo.Parse(name, text)
	if err != nil {
		return topo.Spec{}, cli.Usage(err, "/usr/share/doc/fared/topo.md describes the keys of a file")
	}
	return spec, nil
}

func topoCheckCommand(e *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use: "check FILE...", Short: "Check files that describe fabrics; exit 0, or 2 with every error",
		Example: "  fared topo check fabric.yaml",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cli.Usage(errors.New("check needs a file"), "for example: fared topo check fabric.yaml")
			}
			return nil
		},
		ValidArgsFunction: completeYAML,
		RunE: func(_ *cobra.Command, args []string) error {
			var errs []error
			for _, name := range args {
				spec, err := readFabric(name)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				f, err := topo.New(spec)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				fmt.Fprintf(e.Out, "%s: %s\n", name, f.Title())
			}
			if err := errors.Join(errs...); err != nil {
				return cli.Usage(err, "/usr/share/doc/fared/topo.md describes the keys of a file")
			}
			return nil
		},
	}
}

func topoDrawCommand(e *cli.Env) *cobra.Command {
	var format, out string
	c := &cobra.Command{Use: "draw", Short: "Draw a fabric"}
	a := addFabricArgs(c)
	c.Long = `Draws a fabric as SVG or as a Graphviz graph. Identical parts of a large fabric share one box.`
	c.Example = "  fared topo draw --example two-tier --out two-tier.svg\n  fared topo draw fabric.yaml --format dot | dot -Tpdf > fabric.pdf"
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := cli.OneOf("format", format, drawFormats...); err != nil {
			return err
		}
		named, err := drawFormat(out)
		if err != nil {
			return err
		}
		if named != "" && !c.Flags().Changed("format") {
			format = named
		}
		if named != "" && named != format {
			return cli.Usage(fmt.Errorf("--out %s ends in another format's name than --format %s", out, format), "leave --format out, or name the file ."+format)
		}
		f, err := a.load(args)
		if err != nil {
			return err
		}
		text := f.SVG()
		if format == "dot" {
			text = f.Dot()
		}
		if out == "" {
			_, err := io.WriteString(e.Out, text)
			return err
		}
		if err := os.WriteFile(out, []byte(text), 0o644); err != nil {
			return cli.Failed(err, "name a writable file with --out")
		}
		return nil
	}
	c.Flags().StringVar(&format, "format", "svg", "svg or dot (default by the ending of --out)")
	c.Flags().StringVar(&out, "out", "", "the file to write (default standard output)")
	cli.Choices(c, "format", drawFormats...)
	_ = c.MarkFlagFilename("out")
	return c
}

var drawFormats = []string{"svg", "dot"}

// drawFormat returns the format of a file's extension, "" for a file without one.
func drawFormat(file string) (string, error) {
	switch ending := strings.ToLower(filepath.Ext(file)); ending {
	case "":
		return "", nil
	case ".svg":
		return "svg", nil
	case ".dot", ".gv":
		return "dot", nil
	default:
		return "", cli.Usage(fmt.Errorf("--out %s: %s files cannot be written", file, ending),
			"use .svg or .dot; for others: fared topo draw --format dot | dot -T"+ending[1:]+" > "+filepath.Base(file))
	}
}

func topoGenerateCommand(e *cli.Env) *cobra.Command {
	var out, target string
	var force bool
	c := &cobra.Command{Use: "generate", Short: "Write the configurations of all nodes, and their cabling"}
	a := addFabricArgs(c)
	c.Long = `Writes into a directory: the configuration of every node (nodes/NODE), the cabling table
(cabling.txt, cabling.csv), drawings, the description with the flags applied, and
with --for netns a script that makes the network namespaces and cables (netns.sh), with
--for containerlab a topology file (NAME.clab.yml), with --for networkd, netplan or ifupdown the
files that set the addresses of each server: those of its cables, and the loopbacks on lo.

The same description gives the same files. A directory that is not empty is rejected,
except with --force, which overwrites the generated files and keeps all others.`
	c.Example = "  fared topo generate --example two-tier --out two-tier\n  fared topo generate fabric.yaml --leaf frr --out fabric --for containerlab"
	c.RunE = func(_ *cobra.Command, args []string) error {
		if out == "" {
			return cli.Usage(errors.New("--out is missing"), "name the directory to write into: --out DIR")
		}
		t, err := topo.ParseTarget(target)
		if err != nil {
			return cli.Usage(fmt.Errorf("--for: %w", err), "see fared topo generate --help")
		}
		f, err := a.load(args)
		if err != nil {
			return err
		}
		if err := writeFabric(e, out, f.Generate(t), force); err != nil {
			return err
		}
		for _, note := range f.Notes(t) {
			fmt.Fprintln(e.Err, "note:", note)
		}
		return nil
	}
	c.Flags().StringVar(&out, "out", "", "directory for the files; created if it does not exist")
	c.Flags().StringVar(&target, "for", string(topo.Machines), "kind of the nodes: "+words(topo.Targets()))
	c.Flags().BoolVar(&force, "force", false, "write into a directory that is not empty")
	cli.Choices(c, "for", strings.Split(words(topo.Targets()), ", ")...)
	_ = c.MarkFlagDirname("out")
	return c
}

func words[T ~string](list []T) string {
	var b strings.Builder
	for i, w := range list {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(string(w))
	}
	return b.String()
}

// writeFabric writes files below a folder, and prints their names: one line for all files of nodes.
func writeFabric(e *cli.Env, dir string, files []topo.File, force bool) error {
	const remedy = "name a writable directory with --out"
	switch entries, err := os.ReadDir(dir); {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return cli.Failed(err, remedy)
	case len(entries) > 0 && !force:
		return cli.Usage(fmt.Errorf("%s is not empty", dir), "name another directory, or add --force, which overwrites the generated files")
	}
	nodes := map[string]bool{}
	for _, f := range files {
		path := filepath.Join(dir, filepath.FromSlash(f.Name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return cli.Failed(err, remedy)
		}
		mode := os.FileMode(0o644)
		if strings.HasPrefix(f.Text, "#!") {
			mode = 0o755
		}
		if err := os.WriteFile(path, []byte(f.Text), mode); err != nil {
			return cli.Failed(err, remedy)
		}
		if folder, isNode := strings.CutPrefix(f.Name, "nodes/"); isNode {
			nodes[strings.SplitN(folder, "/", 2)[0]] = true
		} else {
			fmt.Fprintln(e.Out, path)
		}
	}
	_, err := fmt.Fprintf(e.Out, "%s: %s\n", filepath.Join(dir, "nodes"), cli.Several(len(nodes), "node"))
	return err
}

func topoShowCommand(e *cli.Env) *cobra.Command {
	c := &cobra.Command{Use: "show", Short: "Show a fabric's nodes, addresses and AS numbers"}
	a := addFabricArgs(c)
	c.Long = `Shows nodes, addresses and AS numbers of a fabric; with -o json or yaml every key of its
description, every node and every cable.`
	c.Example = "  fared topo show --example figure1\n  fared topo show fabric.yaml -o json"
	c.RunE = func(_ *cobra.Command, args []string) error {
		f, err := a.load(args)
		if err != nil {
			return err
		}
		if e.Output != "table" {
			compact, err := json.Marshal(fabricView(f))
			if err != nil {
				return err
			}
			return cli.PrintJSON(e.Out, e.Output, compact)
		}
		fmt.Fprintln(e.Out, f.Title())
		fmt.Fprintln(e.Out)
		w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
		fabricTable(w, f)
		return w.Flush()
	}
	return cli.ReadFlags(e, c)
}

func fabricTable(w io.Writer, f *topo.Fabric) {
	cli.Row(w, "NODES", "COUNT", "RUNS", "AS", "BGP IDENTIFIER", "SESSIONS EACH")
	for _, list := range [][]*topo.Node{f.Server, f.Leaf, f.Spine} {
		if len(list) == 0 {
			continue
		}
		first, last := list[0], list[len(list)-1]
		least, most := len(f.At(first)), len(f.At(first))
		for _, n := range list {
			least, most = min(least, len(f.At(n))), max(most, len(f.At(n)))
		}
		cli.Row(w, span(first.Name, last.Name), fmt.Sprint(len(list)), f.Software(first), span(first.AS, last.AS), span(first.ID, last.ID), span(least, most))
	}
	fmt.Fprintln(w)
	cli.Row(w, "PLANE", "LEAVES", "SPINES", "CABLES", "ADDRESSES")
	for p := range f.Planes {
		var cables []*topo.Cable
		for _, c := range f.Cables {
			if c.Plane == p {
				cables = append(cables, c)
			}
		}
		cli.Row(w, f.PlaneName(p), fmt.Sprint(f.Leaves), fmt.Sprint(f.Spec.Spines), fmt.Sprint(len(cables)), spans(cables[0].Down.Addrs(), cables[len(cables)-1].Up.Addrs()))
	}
	fmt.Fprintln(w)
	cli.Row(w, "GPUS", "LOOPBACKS", "PORT IN A PLANE", "OF", "UPLINK")
	uplink := "-"
	if f.Spec.Spines > 0 {
		uplink = f.UplinkSpeed.String()
	}
	owner := "each server"
	if f.GroupsEach() > 1 {
		owner = "each GPU"
	}
	if f.Overrides != "" {
		owner += ", but " + string(f.Overrides)
	}
	var ends [2][]netip.Addr
	for i, at := range [2][]netip.Prefix{f.LoopbacksAt(0, 0), f.LoopbacksAt(f.Servers-1, f.GPUs-1)} {
		for _, l := range at {
			ends[i] = append(ends[i], l.Addr())
		}
	}
	cli.Row(w, fmt.Sprint(f.Servers*f.GPUs), spans(ends[0], ends[1]), fmt.Sprintf("%d x %s", f.SubPorts, f.Speed), owner, uplink)
}

// span writes the first and the last element of a range.
func span[T comparable](first, last T) string {
	if first == last {
		return fmt.Sprint(first)
	}
	return fmt.Sprintf("%v to %v", first, last)
}

// spans writes the first and the last element of a range for each address family.
func spans(first, last []netip.Addr) string {
	if len(first) == 0 {
		return "link-local"
	}
	all := make([]string, len(first))
	for i := range first {
		all[i] = span(first[i], last[i])
	}
	return strings.Join(all, ", ")
}

// fabricJSON is the output of `fared topo show -o json`.
type fabricJSON struct {
	Name   string          `json:"name"`
	Title  string          `json:"title"`
	Spec   json.RawMessage `json:"spec"` // as in a file
	Nodes  []nodeJSON      `json:"nodes"`
	Cables []cableJSON     `json:"cables"`
}

type nodeJSON struct {
	Name      string   `json:"name"`
	Kind      string   `json:"kind"`
	Plane     string   `json:"plane,omitempty"`
	Software  string   `json:"software"`
	AS        uint32   `json:"as"`
	RouterID  string   `json:"router_id"`
	Loopbacks []string `json:"loopbacks,omitempty"`
}

type cableJSON struct {
	Plane    string  `json:"plane"`
	From     endJSON `json:"from"`
	To       endJSON `json:"to"`
	SpeedBPS uint64  `json:"speed_bps"`
	// Loopbacks are those that the sub-port serves, if GPUs own their ports.
	Loopbacks []string `json:"loopbacks,omitempty"`
}

type endJSON struct {
	Node    string `json:"node"`
	Device  string `json:"device"`
	Address string `json:"address,omitempty"` // IPv6 if the fabric has no IPv4; absent on unnumbered cables
	// Address6 is the IPv6 address if the fabric has both families.
	Address6 string `json:"address6,omitempty"`
}

func fabricView(f *topo.Fabric) fabricJSON {
	v := fabricJSON{Name: f.Name, Title: f.Title()}
	var keys []string
	for _, k := range topo.Keys() {
		if text := k.Text(f.Spec); text != "" {
			if k.Kind() != "int" {
				text = strconv.Quote(text)
			}
			keys = append(keys, strconv.Quote(k.Name)+":"+text)
		}
	}
	v.Spec = json.RawMessage("{" + strings.Join(keys, ",") + "}")
	for _, n := range f.Nodes() {
		node := nodeJSON{Name: n.Name, Kind: n.Kind.String(), Software: f.Software(n), AS: n.AS, RouterID: n.ID.String()}
		if n.Plane >= 0 {
			node.Plane = f.PlaneName(n.Plane)
		}
		if n.Kind == topo.KindServer {
			for g := range f.GPUs {
				for _, l := range f.LoopbacksAt(n.Index, g) {
					node.Loopbacks = append(node.Loopbacks, l.String())
				}
			}
		}
		v.Nodes = append(v.Nodes, node)
	}
	end := func(e *topo.End) endJSON {
		all := e.Addrs()
		v := endJSON{Node: e.Node.Name, Device: e.Device}
		if len(all) > 0 {
			v.Address = topo.OnCable(all[0]).String()
		}
		if len(all) > 1 {
			v.Address6 = topo.OnCable(all[1]).String()
		}
		return v
	}
	for _, c := range f.Cables {
		cable := cableJSON{Plane: f.PlaneName(c.Plane), From: end(&c.Down), To: end(&c.Up), SpeedBPS: uint64(c.Speed)}
		if c.Group != nil && f.GroupsEach() > 1 {
			for _, l := range f.LoopbacksOf(c.Group) {
				cable.Loopbacks = append(cable.Loopbacks, l.String())
			}
		}
		v.Cables = append(v.Cables, cable)
	}
	return v
}
