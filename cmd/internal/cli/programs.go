package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

// LabProgram is the name of the program of laboratories.
const LabProgram = "fared-lab"

// LabCommands are the commands of the program of laboratories, which `fared` lists in its help and executes.
var LabCommands = []LabCommand{
	{"lab", "lab", "Watch weights follow failures in a fabric of real BGP sessions"},
	{"topo", "lab", "Describe a fabric in a few lines, and generate configurations and drawings from it"},
	{"traffic", "lab", "Send verified traffic between loopbacks over the slots of fared"},
	{"superp-agent", "lab", "Run a SUPERp endpoint with its agent, as a peer for other implementations"},
	{"fleet", "fleet", "See a fabric as a whole: which part is at fault, and what if"},
	{"nupanet", "daemon", "Carry TCP/IP between two machines or namespaces through shared memory"},
	{"supervise", "", "Keep commands running: PID 1 of a container"},
	{"netsetup", "", "Give this machine's devices the addresses of a configuration (for containers and labs)"},
	{"podsetup", "", "Prepare a node for fared's pod: configuration, directories, network plugin (charts/fared)"},
}

// LabCommand describes a command of the program of laboratories. A command without a group of the help is hidden.
type LabCommand struct{ Name, Group, Short string }

// LabPages returns the names of the manual pages of LabCommands.
func LabPages() (pages []string) {
	for _, c := range LabCommands {
		if c.Group != "" {
			pages = append(pages, "fared-"+c.Name)
		}
	}
	return pages
}

// IsLabCommand reports whether a command belongs to the program of laboratories.
func IsLabCommand(name string) bool {
	return slices.ContainsFunc(LabCommands, func(c LabCommand) bool { return c.Name == name })
}

// Program returns the path of another program of fared: in the folder of this process's program, or else in PATH. The
// name of a program is also that of its package.
func Program(name string) (string, error) {
	const remedy = "install the package %[1]s, or put %[1]s of 'make build' into the same folder as %[2]s"
	self, err := os.Executable()
	if err != nil {
		return "", Failed(err, "is /proc mounted?")
	}
	folder := filepath.Dir(self)
	path, err := exec.LookPath(filepath.Join(folder, name))
	if err != nil {
		path, err = exec.LookPath(name)
	}
	if errors.Is(err, exec.ErrNotFound) {
		err = fmt.Errorf("the program %s is neither in %s nor in PATH", name, folder)
	}
	if err != nil {
		return "", Failed(err, fmt.Sprintf(remedy, name, self))
	}
	return path, nil
}
