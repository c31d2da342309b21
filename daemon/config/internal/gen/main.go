// Command gen writes the JSON schema of the configuration, docs/configuration.md and the manual page fared.yaml(5) from
// the Go types of daemon/config.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

// Files of the repository, relative to its root.
const (
	typesFile    = "daemon/config/types.go"
	schemaFile   = "daemon/config/fared.schema.json"
	markdownFile = "docs/configuration.md"
	manFile      = "packaging/fared.yaml.5"
	serverFile   = "examples/server-8gpu.yaml"
	leafFile     = "examples/leaf.yaml"
)

func main() {
	root := flag.String("root", ".", "root of the repository")
	flag.Parse()
	if err := run(*root); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(root string) error {
	files, err := generate(root)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := os.WriteFile(filepath.Join(root, f.name), f.content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

type file struct {
	name    string
	content []byte
}

// generate makes every generated file without writing it.
func generate(root string) ([]file, error) {
	doc, err := readComments(filepath.Join(root, typesFile))
	if err != nil {
		return nil, err
	}
	schema, err := makeSchema(doc)
	if err != nil {
		return nil, err
	}
	var examples []example
	for _, e := range []example{{title: "A server with 8 GPUs", name: serverFile}, {title: "A software leaf", name: leafFile}} {
		text, err := os.ReadFile(filepath.Join(root, e.name))
		if err != nil {
			return nil, err
		}
		e.text = string(text)
		examples = append(examples, e)
	}
	markdown, err := makeMarkdown(schema, examples)
	if err != nil {
		return nil, err
	}
	man, err := makeMan(schema, examples[0])
	if err != nil {
		return nil, err
	}
	return []file{{schemaFile, schema}, {markdownFile, markdown}, {manFile, man}}, nil
}
