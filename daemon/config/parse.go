package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Load reads a configuration file and the password and key files that it names. The error is Errors if the content is
// invalid, and wraps the system's error if a file cannot be read.
func Load(path string) (*Config, error) {
	return load(path, nil)
}

// Inspect is Load for a process other than the daemon: it does not read credentials of a systemd unit to which the
// process does not belong, and returns their names.
func Inspect(path string) (c *Config, unread []string, err error) {
	c, err = load(path, &unread)
	return c, unread, err
}

// InspectFrom is Inspect of a file that is read from f; name represents it in errors, and its folder is that of
// relative names in it.
func InspectFrom(name string, f io.Reader) (c *Config, unread []string, err error) {
	c, err = loadFrom(name, f, &unread)
	return c, unread, err
}

func load(path string, unread *[]string) (*Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	defer f.Close()
	return loadFrom(path, f, unread)
}

func loadFrom(path string, f io.Reader, unread *[]string) (*Config, error) {
	data, err := io.ReadAll(io.LimitReader(f, MaxFileSize+1))
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	c, p := parse(path, data)
	if p.result() == nil {
		readSecrets(c, p, path, unread)
	}
	if err := p.result(); err != nil {
		return nil, err
	}
	return c, nil
}

// Parse reads a configuration from memory; name represents the file in errors. It accesses no file: passwords stay
// empty, and TLS files are not checked. The error is Errors.
func Parse(name string, data []byte) (*Config, error) {
	c, p := parse(name, data)
	if err := p.result(); err != nil {
		return nil, err
	}
	return c, nil
}

func parse(name string, data []byte) (*Config, *problems) {
	p := &problems{file: name, places: map[string]position{"": {1, 1}}, broken: map[string]bool{}}
	c := &Config{}
	root := document(p, data)
	if root == nil {
		return nil, p
	}
	d := decoder{p}
	d.object(root, "", c)
	resolve(c, p.written)
	validate(c, p)
	return c, p
}

// document checks the text and returns the root of its only YAML document, or nil after an error.
func document(p *problems, data []byte) *yaml.Node {
	if !checkText(p, data) {
		return nil
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var first, second yaml.Node
	err := dec.Decode(&first)
	if errors.Is(err, io.EOF) {
		p.at(position{1, 1}, "", "is empty", "start from an example such as examples/server-8gpu.yaml")
		return nil
	}
	if err != nil {
		syntaxError(p, data, err)
		return nil
	}
	switch err := dec.Decode(&second); {
	case err == nil:
		p.at(position{second.Line, second.Column}, "", "a second document starts here", "keep one document in a file")
	case !errors.Is(err, io.EOF):
		syntaxError(p, data, err)
	}
	return first.Content[0]
}

// checkText rejects text with which positions or messages of the YAML parser would mislead.
func checkText(p *problems, data []byte) bool {
	if len(data) > MaxFileSize {
		p.at(position{1, 1}, "", fmt.Sprintf("is larger than %d bytes", MaxFileSize), "use one file for each server or leaf")
		return false
	}
	line := 0
	for text := range bytes.Lines(data) {
		line++
		text = bytes.TrimSuffix(bytes.TrimSuffix(text, []byte("\n")), []byte("\r"))
		column, indent := 0, true
		for rest := text; len(rest) > 0; {
			r, size := utf8.DecodeRune(rest)
			rest = rest[size:]
			column++
			here := position{line, column}
			switch {
			case r == utf8.RuneError && size == 1:
				p.at(here, "", "is not UTF-8", "save the file as UTF-8")
				return false
			case r == '\t' && indent:
				p.at(here, "", "a tab indents this line", "indent with spaces")
			case r == '\t':
			case r < ' ' || r >= 0x7f && r < 0xa0 || r == '\u2028' || r == '\u2029' || r == '\ufeff' || r == '\ufffe' || r == '\uffff':
				p.at(here, "", fmt.Sprintf("holds the control character U+%04X", r), "remove it")
				return false
			}
			indent = indent && (r == ' ' || r == '\t')
			if r == '\t' && indent {
				indent = false // one error per line
			}
		}
	}
	return len(p.errs) == 0
}

var yamlLine = regexp.MustCompile(`^yaml: (?:unmarshal errors:\s*)?line (\d+): `)

// syntaxError reports an error of the YAML parser, at the line of the mistake if locate finds one, else at the parser's
// position.
func syntaxError(p *problems, data []byte, err error) {
	text, line := err.Error(), 1
	if m := yamlLine.FindStringSubmatch(text); m != nil {
		text = text[len(m[0]):]
		if n, err := strconv.Atoi(m[1]); err == nil {
			line = min(max(n, 1), bytes.Count(data, []byte("\n"))+1)
		}
	}
	text = strings.TrimPrefix(text, "yaml: ")
	if at, wrong := locate(data); at > 0 {
		line, text = at, wrong
	}
	p.at(position{line, 1}, "", "is not YAML: "+strings.ReplaceAll(text, "\n", " "), "check this line and the one before it")
}
