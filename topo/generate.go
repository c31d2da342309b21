package topo

import (
	"fmt"
	"path"
	"strings"
	"time"
)

// The fabrics in containerlab/ are committed as they are generated.
//
//go:generate go run ../cmd/fared topo generate ../containerlab/frr/fabric.yaml --out ../containerlab/frr --for containerlab --force
//go:generate go run ../cmd/fared topo generate ../containerlab/fared/fabric.yaml --out ../containerlab/fared --for containerlab --force
//go:generate go run ../cmd/fared topo generate ../containerlab/bird/fabric.yaml --out ../containerlab/bird --for containerlab --force
//go:generate go run ../cmd/fared topo generate ../containerlab/two-tier/fabric.yaml --out ../containerlab/two-tier --for containerlab --force

// Target is what files are generated for.
type Target string

// The targets.
const (
	Machines     Target = "machines"     // servers and switches of their own
	Netns        Target = "netns"        // network namespaces of one machine
	Containerlab Target = "containerlab" // containers of one machine, which containerlab starts and wires
)

// Targets are all of them.
func Targets() []Target { return []Target{Machines, Netns, Containerlab} }

// LabSpeedScale makes 400G a rate that one machine can shape for every cable, 400 Mbit/s.
const LabSpeedScale = 1000

// labRestartTime is longer than a lab keeps a server's control plane dead.
const labRestartTime = 10 * time.Minute

// dataplaneSocket is where `fared dataplane` is on a machine of its own.
const dataplaneSocket = "unix:/run/fared/dataplane.sock"

// Site is that of a target.
func (f *Fabric) Site(target Target) Site {
	switch target {
	case Netns: // they share a file system
		folder := func(node string) string { return path.Join("/run/fared", f.Name, node) }
		return Site{SpeedScale: LabSpeedScale, Speeds: "tbf",
			Socket:    func(node string) string { return path.Join(folder(node), "fared.sock") },
			Dataplane: func(node string) string { return "unix:" + path.Join(folder(node), "dataplane.sock") },
		}
	case Containerlab:
		return Site{SpeedScale: LabSpeedScale, Dataplane: func(string) string { return dataplaneSocket }, RestartTime: labRestartTime, Lab: true}
	}
	return Site{Dataplane: func(string) string { return dataplaneSocket }}
}

// Generate is everything that follows from a description, for a target: the description itself, every node's configuration in
// nodes/NODE, the cabling tables, drawings, and what wires the nodes.
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
		if target == Containerlab && f.Software(n) == BIRD {
			files = append(files, File{path.Join("nodes", n.Name, addressFile), strings.Join(wiring[i].IP(), "\n") + "\n"})
		}
	}
	return files
}

// Notes are what is worth knowing before the fabric is built, a sentence or two each.
func (f *Fabric) Notes() []string {
	if f.Spines < 2 || f.Spec.Leaf == Fared {
		return nil
	}
	return []string{fmt.Sprintf("leaves with %s tell each of %d spines all that they have toward a server, and cannot share it out as those with fared do. "+
		"After some failures weights are wrong: fared topo simulate --all-single says after which.", strings.ToUpper(f.Spec.Leaf), f.Spines)}
}

// ParseTarget reads a target.
func ParseTarget(s string) (Target, error) {
	for _, t := range Targets() {
		if s == string(t) {
			return t, nil
		}
	}
	return "", fmt.Errorf("%q is no target: use machines, netns or containerlab", s)
}
