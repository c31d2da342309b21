package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLoadFiles holds what Load says about the files that a configuration names.
func TestLoadFiles(t *testing.T) {
	const text = `as: 4200000001
loopbacks: [10.255.0.1/32]
accept: [10.255.0.0/16]
planes:
  - name: p0
    sub_ports:
      - {device: eth0, sessions: [{peer: 10.0.0.0, password_file: secret}]}
api: {listen: "0.0.0.0:7778", tls: {cert_file: cert, key_file: key, client_ca_file: ca}}
`
	const at = "planes[0].sub_ports[0].sessions[0].password_file: DIR/secret "
	for _, test := range []struct {
		name     string
		password string
		mode     fs.FileMode
		change   func(dir string) error
		want     string // errors; "" = none
	}{
		{name: "newline", password: "correct horse\n", mode: 0o600},
		{name: "owner reads", password: "correct horse", mode: 0o400},
		{name: "group reads", password: "x", mode: 0o640, want: "7:67: " + at + "is open to others (mode 0640), chmod 0600 it, and change the secret"},
		{name: "empty", password: "\n", mode: 0o600, want: "7:67: " + at + "is empty, write the password into it"},
		{name: "longest", password: strings.Repeat("p", 80) + "\r\n", mode: 0o600},
		{name: "too long", password: strings.Repeat("p", 81), mode: 0o600, want: "7:67: " + at + "holds more than 80 bytes, use a shorter password, the limit of TCP MD5"},
		{name: "two lines", password: "a\nb\n", mode: 0o600, want: "7:67: " + at + "holds more than one line, write the password alone into it"},
		{name: "directory", password: "a", mode: 0o600, change: func(dir string) error {
			return errors.Join(os.Remove(dir+"/secret"), os.Mkdir(dir+"/secret", 0o700))
		}, want: "7:67: " + at + "is not a regular file, name a file"},
		{name: "no files", password: "a", mode: 0o600, change: func(dir string) error {
			return errors.Join(os.Remove(dir+"/secret"), os.Remove(dir+"/cert"), os.Remove(dir+"/ca"), os.Chmod(dir+"/key", 0o644))
		}, want: "7:67: " + at + "does not exist, create it or correct the name\n" +
			"8:48: api.tls.cert_file: DIR/cert does not exist, create it or correct the name\n" +
			"8:64: api.tls.key_file: DIR/key is open to others (mode 0644), chmod 0600 it, and change the secret\n" +
			"8:85: api.tls.client_ca_file: DIR/ca does not exist, create it or correct the name"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "fared.yaml")
			for name, content := range map[string]string{"fared.yaml": text, "secret": test.password, "cert": "c", "key": "k", "ca": "c"} {
				mode := fs.FileMode(0o600)
				if name == "secret" {
					mode = test.mode
				}
				path := filepath.Join(dir, name)
				if err := errors.Join(os.WriteFile(path, []byte(content), mode), os.Chmod(path, mode)); err != nil {
					t.Fatal(err)
				}
			}
			if test.change != nil {
				if err := test.change(dir); err != nil {
					t.Fatal(err)
				}
			}
			c, err := Load(file)
			if test.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				s := c.Planes[0].SubPorts[0].Sessions[0]
				if want := strings.TrimRight(test.password, "\r\n"); s.Password != want || s.PasswordFile != dir+"/secret" {
					t.Errorf("password %q from %s, want %q", s.Password, s.PasswordFile, want)
				}
				if c.API.TLS.KeyFile != dir+"/key" {
					t.Errorf("key file %s is not relative to the configuration file", c.API.TLS.KeyFile)
				}
				if strings.Contains(c.Text(), "correct horse") {
					t.Error("Text shows a password")
				}
				return
			}
			var lines []string
			for _, line := range strings.Split(test.want, "\n") {
				lines = append(lines, file+":"+strings.ReplaceAll(line, "DIR", dir))
			}
			if want := strings.Join(lines, "\n"); err == nil || err.Error() != want || c != nil {
				t.Errorf("Load =\n%v\nwant\n%s", err, want)
			}
		})
	}
}

func TestLoadUnreadable(t *testing.T) {
	if _, err := Load(filepath.Join(t.TempDir(), "absent.yaml")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Load of an absent file = %v", err)
	}
	if _, err := Load(t.TempDir()); err == nil {
		t.Error("Load of a directory succeeds")
	}
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("as: [1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var errs Errors
	var one Error
	if _, err := Load(bad); !errors.As(err, &errs) || !errors.As(err, &one) || one.File != bad {
		t.Errorf("Load = %#v", err)
	}
}
