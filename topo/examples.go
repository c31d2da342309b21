package topo

import (
	"embed"
	"fmt"
	"strings"
)

//go:embed examples/*.yaml
var examples embed.FS

// Examples are the names of the fabrics that Example knows.
func Examples() []string { return []string{"figure1", "superpod", "two-tier", "dual-leaf"} }

// Example is a fabric that comes with this package, as a file (topo/examples).
func Example(name string) ([]byte, error) {
	text, err := examples.ReadFile("examples/" + name + ".yaml")
	if err != nil {
		return nil, fmt.Errorf("there is no example %q; the examples are %s", name, strings.Join(Examples(), ", "))
	}
	return text, nil
}
