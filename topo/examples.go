package topo

import (
	"embed"
	"fmt"
	"strings"
)

//go:embed examples/*.yaml
var examples embed.FS

// Examples returns the names of the fabrics that Example accepts.
func Examples() []string {
	return []string{"figure1", "figure1-servers", "superpod", "two-tier", "dual-leaf"}
}

// Example returns the file of a fabric that this package includes
// (topo/examples).
func Example(name string) ([]byte, error) {
	text, err := examples.ReadFile("examples/" + name + ".yaml")
	if err != nil {
		return nil, fmt.Errorf("there is no example %q; the examples are %s", name, strings.Join(Examples(), ", "))
	}
	return text, nil
}
