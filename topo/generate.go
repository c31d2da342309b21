package topo

import (
	"fmt"
	"path"
	"strings"
)

// The fabrics in containerlab/ are committed as they are generated.
//
//go:generate go run ../cmd/fared-lab topo generate ../containerlab/frr/fabric.yaml --out ../containerlab/frr --for containerlab --force
//go:generate go run ../cmd/fared-lab topo generate ../containerlab/fared/fabric.yaml --out ../containerlab/fared --for containerlab --force
//go:generate go run ../cmd/fared-lab topo generate ../containerlab/bird/fabric.yaml --out ../containerlab/bird --for containerlab --force
//go:generate go run ../cmd/fared-lab topo generate ../containerlab/two-tier/fabric.yaml --out ../containerlab/two-tier --for containerlab --force
//go:generate go run ../cmd/fared-lab topo generate ../containerlab/own-ports/fabric.yaml --out ../containerlab/own-ports --for containerlab --force

// Target is the environment for which files are generated.
type Target string

// The targets.
const (
	Machines     Target = "machines"     // separate servers and switches
	Netns        Target = "netns"        // network namespaces of one machine
	Containerlab Target = "containerlab" // containers of one machine, which containerlab starts and connects

	// Separate machines, with files for the program that sets the servers' addresses.
	Networkd Target = "networkd"
	Netplan  Target = "netplan"
	Ifupdown Target = "ifupdown"
)

// Targets returns all targets.
func Targets() []Target { return []Target{Machines, Netns, Containerlab, Networkd, Netplan, Ifupdown} }

// LabRateScale shapes cables of 400G to 400 Mbit/s, a rate that one machine can carry on every cable.
const LabRateScale = 1000

// dataplaneSocket is the address of `fared dataplane` on a separate machine.
const dataplaneSocket = "unix:/run/fared-dataplane/dataplane.sock"

// Site returns the environment in which the nodes of a target run: rates, and paths of sockets.
func (f *Fabric) Site(target Target) Site {
	switch target {
	case Netns: // the nodes share a file system
		folder := func(node string) string { return path.Join("/run/fared", f.Name, node) }
		return Site{Lab: true, RateScale: LabRateScale,
			Socket:    func(node string) string { return path.Join(folder(node), "fared.sock") },
			Dataplane: func(node string) string { return "unix:" + path.Join(folder(node), "dataplane.sock") },
		}
	case Containerlab:
		return Site{Lab: true, Dataplane: func(string) string { return dataplaneSocket }}
	}
	return Site{Dataplane: func(string) string { return dataplaneSocket }}
}

// Generate returns all files of a description for a target: the description itself, every node's configuration in
// nodes/NODE, the cabling tables, drawings, and the wiring of the nodes or the addresses of the servers.
func (f *Fabric) Generate(target Target) []File {
	site := f.Site(target)
	files := []File{
		{SpecFile, "# " + f.Title() + "\n" + string(Marshal(f.Spec))},
		{"cabling.txt", f.CablingText()},
		{"cabling.csv", f.CablingCSV()},
		{"fabric.svg", f.SVG()},
		{"fabric.dot", f.Dot()},
	}
	switch target {
	case Netns:
		files = append(files, f.NetnsScript(site))
	case Containerlab:
		files = append(files, f.Clab())
	}
	wiring := f.Wiring(site)
	for i, n := range f.Nodes() {
		for _, file := range f.Files(n, site) {
			files = append(files, File{path.Join("nodes", n.Name, file.Name), file.Text})
		}
		if n.Kind == KindServer {
			for _, file := range addressFiles(wiring[i], target) {
				files = append(files, File{path.Join("nodes", n.Name, file.Name), file.Text})
			}
		}
		if target == Containerlab && f.Software(n) == BIRD {
			files = append(files, File{path.Join("nodes", n.Name, addressFile), strings.Join(wiring[i].IP(), "\n") + "\n"})
		}
	}
	return files
}

// Notes returns facts to consider before the fabric is built for a target, a sentence or two each.
func (f *Fabric) Notes(target Target) (all []string) {
	if f.Spines > 1 && f.Spec.Leaf != Fared {
		all = append(all, fmt.Sprintf("leaves that run %s advertise their full bandwidth toward a server to each of %d spines, and cannot divide it as fared does. "+
			"After some failures weights are wrong: fared topo simulate --all-single lists these failures.", strings.ToUpper(f.Spec.Leaf), f.Spines))
	}
	if name := f.Cables[0].Down.Device; target == Ifupdown && strings.Contains(name, ".") {
		all = append(all, fmt.Sprintf("%s is the name of a VLAN to ifupdown, because of the dot: ifdown deletes the device, or fails at a NIC. "+
			"Choose other names by devices: 'eth{n}' (--devices).", name))
	}
	return all
}

// ParseTarget parses the name of a target.
func ParseTarget(s string) (Target, error) {
	for _, t := range Targets() {
		if s == string(t) {
			return t, nil
		}
	}
	return "", fmt.Errorf("%q is not a target: use machines, netns, containerlab, networkd, netplan or ifupdown", s)
}
