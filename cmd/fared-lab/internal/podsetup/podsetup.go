// Package podsetup prepares a pod of fared on its node, from an image that has no shell: the node's configuration, the
// directories of the control plane's user, and the plugin of the container runtime.
package podsetup

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/fared/fared/topo"
)

// The files of a folder of configurations. All are optional.
const (
	FabricFile  = "fabric.yaml"  // the description of a fabric (package topo)
	ServersFile = "servers.yaml" // a mapping of nodes to servers of the fabric; a node without an entry is the server of its name
	CommonFile  = "common.yaml"  // a patch for all nodes
)

// Config returns the configuration of a node: that of its server in the fabric, with the patch for all nodes and then
// that of the node, NODE.yaml, applied (RFC 7386). In a folder without a fabric the first patch is the configuration.
// The error names a node that has neither a server nor a patch.
func Config(dir, node string) ([]byte, error) {
	document, err := server(dir, node)
	if err != nil {
		return nil, err
	}
	own := false
	for _, name := range []string{CommonFile, node + ".yaml"} {
		patch, err := read(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		if patch != nil {
			document = merge(document, patch)
			own = own || name != CommonFile
		}
	}
	if document == nil || !own && !exists(filepath.Join(dir, FabricFile)) {
		return nil, fmt.Errorf("node %s has no configuration: %s has neither %s nor %s.yaml", node, dir, FabricFile, node)
	}
	return encode(document)
}

// Listen returns a configuration with metrics.listen.
func Listen(text []byte, address string) ([]byte, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, err
	}
	patch := yaml.Node{}
	if err := patch.Encode(map[string]any{"metrics": map[string]string{"listen": address}}); err != nil {
		return nil, err
	}
	return encode(merge(root(&document), &patch))
}

// server returns the configuration of the node's server, nil without a fabric, or for a node that the fabric lacks and
// that has a patch.
func server(dir, node string) (*yaml.Node, error) {
	text, err := os.ReadFile(filepath.Join(dir, FabricFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	spec, err := topo.Parse(FabricFile, text)
	if err != nil {
		return nil, err
	}
	fabric, err := topo.New(spec)
	if err != nil {
		return nil, err
	}
	servers, name := map[string]string{}, node
	if text, err = os.ReadFile(filepath.Join(dir, ServersFile)); err == nil {
		err = yaml.Unmarshal(text, &servers)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", ServersFile, err)
	}
	if mapped, ok := servers[node]; ok {
		name = mapped
	}
	at := slices.IndexFunc(fabric.Server, func(n *topo.Node) bool { return n.Name == name })
	if at < 0 && name == node && exists(filepath.Join(dir, node+".yaml")) {
		return nil, nil
	}
	if at < 0 {
		return nil, fmt.Errorf("node %s: %q is no server of the fabric %s, which has server1 to server%d: %s assigns nodes", node, name, fabric.Name, len(fabric.Server), ServersFile)
	}
	return parse(FabricFile, []byte(fabric.Files(fabric.Server[at], fabric.Site(topo.Machines))[0].Text))
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

// read reads a document, nil if the file is absent or empty.
func read(name string) (*yaml.Node, error) {
	text, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return parse(filepath.Base(name), text)
}

// parse parses a mapping, nil for an empty text.
func parse(name string, text []byte) (*yaml.Node, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	top := root(&document)
	if top == nil || top.Tag == "!!null" {
		return nil, nil
	}
	if top.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s: line %d: want a mapping of keys of fared.yaml", name, top.Line)
	}
	return top, nil
}

// root returns the value of a document, nil if it is empty.
func root(document *yaml.Node) *yaml.Node {
	if len(document.Content) == 0 {
		return nil
	}
	return document.Content[0]
}

func encode(document *yaml.Node) ([]byte, error) {
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(document); err != nil {
		return nil, err
	}
	return b.Bytes(), e.Close()
}

// merge applies a patch as RFC 7386, Section 2, does: mappings are merged, null removes a key, all else replaces.
func merge(target, patch *yaml.Node) *yaml.Node {
	if patch.Kind != yaml.MappingNode {
		return patch
	}
	if target == nil || target.Kind != yaml.MappingNode {
		target = &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	}
	for i := 0; i+1 < len(patch.Content); i += 2 {
		key, value := patch.Content[i], patch.Content[i+1]
		at := 0
		for at < len(target.Content) && target.Content[at].Value != key.Value {
			at += 2
		}
		found := at < len(target.Content)
		switch {
		case value.Tag == "!!null":
			if found {
				target.Content = slices.Delete(target.Content, at, at+2)
			}
		case found:
			target.Content[at+1] = merge(target.Content[at+1], value)
		default:
			target.Content = append(target.Content, key, merge(nil, value))
		}
	}
	return target
}

// Own makes a directory if it is missing, and gives it and all that is in it to a user and the group of the same
// number. Links are not followed.
func Own(dir string, id int) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return fs.WalkDir(root.FS(), ".", func(name string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // a socket of another process that has ended meanwhile
			return nil
		}
		if err != nil {
			return err
		}
		if err := root.Lchown(name, id, id); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
}

// Install puts a copy of a program into a directory. A process that starts the program meanwhile gets the old or the
// new one.
func Install(program, dir string) (err error) {
	from, err := os.Open(program)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.CreateTemp(dir, ".fared-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			to.Close()
			os.Remove(to.Name())
		}
	}()
	if _, err := io.Copy(to, from); err != nil {
		return err
	}
	if err := errors.Join(to.Chmod(0o755), to.Sync(), to.Close()); err != nil {
		return err
	}
	return os.Rename(to.Name(), filepath.Join(dir, filepath.Base(program)))
}
