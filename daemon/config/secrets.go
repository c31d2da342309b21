package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// maxPassword is the kernel's TCP_MD5SIG_MAXKEYLEN, bytes.
const maxPassword = 80

// readSecrets reads the password files and looks at the TLS files that a valid configuration names. file is the
// configuration file; relative names become relative to its directory.
func readSecrets(c *Config, p *problems, file string) {
	dir := filepath.Dir(file)
	for i := range c.Planes {
		for j := range c.Planes[i].SubPorts {
			sp := &c.Planes[i].SubPorts[j]
			for k := range sp.Sessions {
				if s := &sp.Sessions[k]; s.PasswordFile != "" {
					path := fmt.Sprintf("planes[%d].sub_ports[%d].sessions[%d].password_file", i, j, k)
					s.PasswordFile = absolute(dir, s.PasswordFile)
					s.Password = readPassword(p, path, s.PasswordFile)
				}
			}
		}
	}
	for path, t := range map[string]*TLS{"dataplane.tls": c.Dataplane.TLS, "api.tls": c.API.TLS} { // errors are sorted later
		if t == nil {
			continue
		}
		for _, f := range []struct {
			key    string
			name   *string
			secret bool
		}{{"cert_file", &t.CertFile, false}, {"key_file", &t.KeyFile, true}, {"client_ca_file", &t.ClientCAFile, false}} {
			*f.name = absolute(dir, *f.name)
			if file := openFile(p, join(path, f.key), *f.name, f.secret); file != nil {
				file.Close()
			}
		}
	}
}

func absolute(dir, name string) string {
	if filepath.IsAbs(name) {
		return filepath.Clean(name)
	}
	return filepath.Join(dir, name)
}

// openFile opens a regular file; a secret one must be its owner's alone. It reports what is wrong and returns nil then.
func openFile(p *problems, path, name string, secret bool) *os.File {
	info, err := os.Stat(name) // before opening: opening a FIFO blocks
	if err == nil && !info.Mode().IsRegular() {
		p.add(path, name+" is not a regular file", "name a file")
		return nil
	}
	var f *os.File
	if err == nil {
		f, err = os.Open(name)
	}
	if err == nil {
		if info, err = f.Stat(); err != nil {
			f.Close()
		}
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		p.add(path, name+" does not exist", "create it or correct the name")
	case errors.Is(err, fs.ErrPermission):
		p.add(path, name+" is not readable", "give the user that fared runs as the right to read it")
	case err != nil:
		p.add(path, err.Error(), "make the file readable")
	case secret && info.Mode().Perm()&0o077 != 0:
		f.Close()
		p.add(path, fmt.Sprintf("%s is open to others (mode %04o)", name, info.Mode().Perm()), "chmod 0600 it, and change the secret")
	default:
		return f
	}
	return nil
}

func readPassword(p *problems, path, name string) string {
	f := openFile(p, path, name, true)
	if f == nil {
		return ""
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxPassword+3))
	if err != nil {
		p.add(path, err.Error(), "make the file readable")
		return ""
	}
	data = bytes.TrimSuffix(bytes.TrimSuffix(data, []byte("\n")), []byte("\r"))
	switch {
	case len(data) == 0:
		p.add(path, name+" is empty", "write the password into it")
	case len(data) > maxPassword:
		p.add(path, fmt.Sprintf("%s holds more than %d bytes", name, maxPassword), "use a shorter password, the limit of TCP MD5")
	case bytes.ContainsAny(data, "\r\n\x00"):
		p.add(path, name+" holds more than one line", "write the password alone into it")
	}
	return string(data)
}
