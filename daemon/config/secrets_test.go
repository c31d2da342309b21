package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// TestLoadAOKey checks that a TCP-AO key file follows the rules of a password file.
func TestLoadAOKey(t *testing.T) {
	const text = "as: 4200000001\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\nplanes:\n  - name: p0\n    sub_ports:\n" +
		"      - {device: eth0, sessions: [{peer: 10.0.0.0, tcp_ao: {key_file: key}}]}\n"
	for _, test := range []struct {
		key, want string // part of the error; "" means none
		mode      fs.FileMode
	}{
		{"correct horse\n", "", 0o600},
		{"x", "key must be readable by fared's user and by no other user, but others can too (mode 0604), give it mode 0600 and fared's user as the owner; for the systemd unit, load it by LoadCredential= and write credential:NAME", 0o604},
		{"", "key is empty, write the key into it", 0o600},
		{strings.Repeat("k", 81), "key holds more than 80 bytes, use a shorter key, within the limit of TCP-AO", 0o600},
	} {
		dir := t.TempDir()
		file, key := filepath.Join(dir, "fared.yaml"), filepath.Join(dir, "key")
		if err := errors.Join(os.WriteFile(file, []byte(text), 0o600), os.WriteFile(key, []byte(test.key), 0o600), os.Chmod(key, test.mode)); err != nil {
			t.Fatal(err)
		}
		c, err := Load(file)
		if test.want != "" {
			if want := file + ":7:71: planes[0].sub_ports[0].sessions[0].tcp_ao.key_file: " + dir + "/" + test.want; err == nil || err.Error() != want {
				t.Errorf("Load = %v, want %s", err, want)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if want := (TCPAO{KeyFile: key, Key: "correct horse", Algorithm: HMACSHA1}); *c.Planes[0].SubPorts[0].Sessions[0].TCPAO != want {
			t.Errorf("loaded %+v, want %+v", c.Planes[0].SubPorts[0].Sessions[0].TCPAO, want)
		}
		if strings.Contains(c.Text(), "correct horse") {
			t.Error("Text shows a key")
		}
	}
}

// TestLoadBFDKeys checks that the files of BFD keys follow the rules of password files, with the longest key of the
// type as the limit, and that no text of the configuration shows a key.
func TestLoadBFDKeys(t *testing.T) {
	const text = "as: 4200000001\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\nbfd: {auth: {type: %s, keys: [{id: 7, key_file: key}]}}\nplanes:\n  - name: p0\n    sub_ports:\n" +
		"      - {device: eth0, sessions: [{peer: 10.0.0.0, bfd_auth: {type: %[1]s, keys: [{id: 8, key_file: key}]}}, {peer: 10.0.0.2}, {peer: 10.0.0.4, bfd_auth: {type: none}}]}\n"
	for _, test := range []struct {
		kind, key, want string // want is a part of the error; "" means none
		mode            fs.FileMode
	}{
		{"meticulous-sha1", "correct horse\n", "", 0o600},
		{"keyed-sha1", strings.Repeat("k", 20), "", 0o400},
		{"keyed-md5", strings.Repeat("k", 16), "", 0o600},
		{"meticulous-md5", "correct horse", "", 0o600},
		{"meticulous-sha1", "x", "key must be readable by fared's user and by no other user, but others can too (mode 0604), give it mode 0600 and fared's user as the owner; for the systemd unit, load it by LoadCredential= and write credential:NAME", 0o604},
		{"meticulous-sha1", "", "key is empty, write the key into it", 0o600},
		{"meticulous-sha1", "correct\nhorse", "key holds more than one line, write the key alone into it", 0o600},
		{"meticulous-sha1", strings.Repeat("k", 21), "key holds more than 20 bytes, use a shorter key, within the limit of BFD with SHA1", 0o600},
		{"keyed-sha1", strings.Repeat("k", 21) + "\n", "key holds more than 20 bytes, use a shorter key, within the limit of BFD with SHA1", 0o600},
		{"keyed-md5", strings.Repeat("k", 17), "key holds more than 16 bytes, use a shorter key, within the limit of BFD with MD5", 0o600},
		{"meticulous-md5", strings.Repeat("k", 40), "key holds more than 16 bytes, use a shorter key, within the limit of BFD with MD5", 0o600},
	} {
		dir := t.TempDir()
		file, key := filepath.Join(dir, "fared.yaml"), filepath.Join(dir, "key")
		if err := errors.Join(os.WriteFile(file, fmt.Appendf(nil, text, test.kind), 0o600), os.WriteFile(key, []byte(test.key), 0o600), os.Chmod(key, test.mode)); err != nil {
			t.Fatal(err)
		}
		c, err := Load(file)
		if test.want != "" {
			if err == nil || !strings.Contains(err.Error(), ": bfd.auth.keys[0].key_file: "+dir+"/"+test.want) ||
				!strings.Contains(err.Error(), ": planes[0].sub_ports[0].sessions[0].bfd_auth.keys[0].key_file: "+dir+"/"+test.want) || !strings.HasPrefix(err.Error(), file+":4:") {
				t.Errorf("Load = %v, want %s", err, test.want)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		secret := strings.TrimSpace(test.key)
		sessions := c.Planes[0].SubPorts[0].Sessions
		if got := c.BFDAuth(&sessions[0]); got.Keys[0] != (BFDKey{8, key, secret}) {
			t.Errorf("the first session has %+v", got)
		}
		if got := c.BFDAuth(&sessions[1]); got.Keys[0] != (BFDKey{7, key, secret}) || got.Type != test.kind {
			t.Errorf("the second session has %+v", got)
		}
		if got := c.BFDAuth(&sessions[2]); got != nil {
			t.Errorf("the third session has %+v", got)
		}
		if strings.Contains(c.Text(), secret) {
			t.Error("Text shows a key")
		}
	}
}

// TestLoadCredentials checks that a credential of the systemd unit can be read in both forms in which systemd provides
// it, by its name or its path, and that nothing in its directory may be accessible to more users than systemd permits.
func TestLoadCredentials(t *testing.T) {
	const text = "as: 4200000001\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\nplanes:\n  - name: p0\n    sub_ports:\n" +
		"      - {device: eth0, sessions: [{peer: 10.0.0.0, password_file: %q}]}\n"
	const remedy = ", give it mode 0600 and fared's user as the owner; for the systemd unit, load it by LoadCredential= and write credential:NAME"
	for _, test := range []struct {
		name, value string // value of password_file; AT is the directory of credentials
		mode        fs.FileMode
		outside     bool   // of a systemd unit
		want        string // part of the error after the key; "" means none
	}{
		{name: "owner", value: "credential:leaf0.md5", mode: 0o400},
		{name: "ACL of root's file", value: "credential:leaf0.md5", mode: 0o440},
		{name: "path", value: "AT/leaf0.md5", mode: 0o440},
		{name: "writable by the group", value: "credential:leaf0.md5", mode: 0o460,
			want: "AT/leaf0.md5 must be readable by fared's user and by no other user, but others can too (mode 0460)" + remedy},
		{name: "world", value: "credential:leaf0.md5", mode: 0o444,
			want: "AT/leaf0.md5 must be readable by fared's user and by no other user, but others can too (mode 0444)" + remedy},
		{name: "not loaded", value: "credential:leaf1.md5", mode: 0o400,
			want: "the unit has no credential leaf1.md5, add LoadCredential=leaf1.md5:FILE to it (systemctl edit fared), and restart it"},
		{name: "path in the place of a name", value: "credential:../leaf0.md5", mode: 0o400,
			want: `"../leaf0.md5" is not the name of a credential, write the name that LoadCredential= has before its colon, such as credential:leaf0.md5`},
		{name: "no unit", value: "credential:leaf0.md5", mode: 0o400, outside: true,
			want: "credential leaf0.md5 cannot be read: this process is not part of a systemd unit ($CREDENTIALS_DIRECTORY is not set), " +
				"start fared by its unit, with LoadCredential=leaf0.md5:FILE, or name a file"},
		{name: "no unit, path", value: "AT/leaf0.md5", mode: 0o440, outside: true,
			want: "AT/leaf0.md5 must be readable by fared's user and by no other user, but others can too (mode 0440)" + remedy},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir, credentials := t.TempDir(), t.TempDir()
			t.Setenv("CREDENTIALS_DIRECTORY", credentials)
			if test.outside {
				os.Unsetenv("CREDENTIALS_DIRECTORY")
			}
			file, secret := filepath.Join(dir, "fared.yaml"), filepath.Join(credentials, "leaf0.md5")
			content := fmt.Sprintf(text, strings.ReplaceAll(test.value, "AT/", credentials+"/"))
			if err := errors.Join(os.WriteFile(file, []byte(content), 0o600), os.WriteFile(secret, []byte("correct horse"), 0o600), os.Chmod(secret, test.mode)); err != nil {
				t.Fatal(err)
			}
			c, err := Load(file)
			if test.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				if s := c.Planes[0].SubPorts[0].Sessions[0]; s.Password != "correct horse" || s.PasswordFile != secret {
					t.Errorf("password %q from %s", s.Password, s.PasswordFile)
				}
			} else if want := file + ":7:67: planes[0].sub_ports[0].sessions[0].password_file: " + strings.ReplaceAll(test.want, "AT/", credentials+"/"); err == nil || err.Error() != want {
				t.Errorf("Load =\n%v\nwant\n%s", err, want)
			}
			// A process other than the daemon skips credentials.
			c, unread, err := Inspect(file)
			if test.name != "no unit" {
				if (err == nil) != (test.want == "") || unread != nil {
					t.Errorf("Inspect: credentials left out %v, error %v", unread, err)
				}
			} else if err != nil || !slices.Equal(unread, []string{"leaf0.md5"}) || c.Planes[0].SubPorts[0].Sessions[0].Password != "" {
				t.Errorf("Inspect outside of the unit: credentials left out %v, error %v", unread, err)
			}
		})
	}
}

// TestLoadSecretOfAnotherUser checks that a file that this process may not read gives the same error and remedy as one
// that other users may read.
func TestLoadSecretOfAnotherUser(t *testing.T) {
	if os.Getenv("FARED_SECRET_OF_ROOT") == "" {
		if os.Getuid() != 0 {
			t.Skip("it takes root to become another user")
		}
		dir := t.TempDir()
		binary := filepath.Join(dir, "test")
		self, err := os.ReadFile(os.Args[0])
		if err != nil {
			t.Fatal(err)
		}
		const text = "as: 4200000001\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\nplanes:\n  - name: p0\n    sub_ports:\n" +
			"      - {device: eth0, sessions: [{peer: 10.0.0.0, password_file: secret}]}\n"
		file := filepath.Join(dir, "fared.yaml")
		if err := errors.Join(os.WriteFile(binary, self, 0o755), os.WriteFile(file, []byte(text), 0o644), os.WriteFile(filepath.Join(dir, "secret"), []byte("x"), 0o600),
			os.Chmod(dir, 0o755), os.Chmod(filepath.Dir(dir), 0o755)); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(binary, "-test.run", "^TestLoadSecretOfAnotherUser$")
		cmd.Env = append(os.Environ(), "FARED_SECRET_OF_ROOT="+file)
		cmd.Dir = dir
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("as another user: %v\n%s", err, out)
		}
		return
	}
	file := os.Getenv("FARED_SECRET_OF_ROOT")
	want := file + ":7:67: planes[0].sub_ports[0].sessions[0].password_file: " + filepath.Dir(file) + "/secret must be readable by fared's user and by no other user, " +
		"but that user cannot read it, give it mode 0600 and fared's user as the owner; for the systemd unit, load it by LoadCredential= and write credential:NAME"
	if _, err := Load(file); err == nil || err.Error() != want {
		t.Errorf("Load =\n%v\nwant\n%s", err, want)
	}
}

// TestLoadFiles checks Load's errors about the files that a configuration names.
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
	cert, key := selfSigned(t)
	for _, test := range []struct {
		name     string
		password string
		mode     fs.FileMode
		change   func(dir string) error
		want     string // errors; "" means none
	}{
		{name: "newline", password: "correct horse\n", mode: 0o600},
		{name: "owner reads", password: "correct horse", mode: 0o400},
		{name: "group reads", password: "x", mode: 0o640, want: "7:67: " + at + "must be readable by fared's user and by no other user, but others can too (mode 0640), give it mode 0600 and fared's user as the owner; for the systemd unit, load it by LoadCredential= and write credential:NAME"},
		{name: "empty", password: "\n", mode: 0o600, want: "7:67: " + at + "is empty, write the password into it"},
		{name: "longest", password: strings.Repeat("p", 80) + "\r\n", mode: 0o600},
		{name: "too long", password: strings.Repeat("p", 81), mode: 0o600, want: "7:67: " + at + "holds more than 80 bytes, use a shorter password, within the limit of TCP MD5"},
		{name: "two lines", password: "a\nb\n", mode: 0o600, want: "7:67: " + at + "holds more than one line, write the password alone into it"},
		{name: "directory", password: "a", mode: 0o600, change: func(dir string) error {
			return errors.Join(os.Remove(dir+"/secret"), os.Mkdir(dir+"/secret", 0o700))
		}, want: "7:67: " + at + "is not a regular file, name a file"},
		{name: "no files", password: "a", mode: 0o600, change: func(dir string) error {
			return errors.Join(os.Remove(dir+"/secret"), os.Remove(dir+"/cert"), os.Remove(dir+"/ca"), os.Chmod(dir+"/key", 0o644))
		}, want: "7:67: " + at + "does not exist, create it or correct the name\n" +
			"8:48: api.tls.cert_file: DIR/cert does not exist, create it or correct the name\n" +
			"8:64: api.tls.key_file: DIR/key must be readable by fared's user and by no other user, but others can too (mode 0644), give it mode 0600 and fared's user as the owner; for the systemd unit, load it by LoadCredential= and write credential:NAME\n" +
			"8:85: api.tls.client_ca_file: DIR/ca does not exist, create it or correct the name"},
		{name: "not PEM", password: "a", mode: 0o600, change: func(dir string) error {
			return os.WriteFile(dir+"/cert", []byte("c"), 0o600)
		}, want: "8:48: api.tls.cert_file: certificate DIR/cert with key DIR/key: tls: failed to find any PEM data in certificate input, " +
			"name a PEM certificate and the PEM key that belongs to it"},
		{name: "no authority", password: "a", mode: 0o600, change: func(dir string) error {
			return os.WriteFile(dir+"/ca", []byte("c"), 0o600)
		}, want: "8:85: api.tls.client_ca_file: certificate authorities: DIR/ca holds no PEM certificate, name a file of PEM certificates"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "fared.yaml")
			for name, content := range map[string]string{"fared.yaml": text, "secret": test.password, "cert": cert, "key": key, "ca": cert} {
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

// selfSigned returns a certificate and its key in PEM.
func selfSigned(t *testing.T) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	text, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: text}))
}

// TestLoadChecksTheRecording checks that a recording that fared run could not write is an error, and that the check
// creates and changes nothing.
func TestLoadChecksTheRecording(t *testing.T) {
	dir := t.TempDir()
	there := filepath.Join(dir, "there")
	if err := errors.Join(os.WriteFile(there, []byte("content"), 0o600), os.Mkdir(filepath.Join(dir, "sub"), 0o700)); err != nil {
		t.Fatal(err)
	}
	const text = "as: 4200000001\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\nplanes:\n  - name: p0\n    sub_ports:\n" +
		"      - {device: eth0, sessions: [{peer: 10.0.0.0}]}\nrecord:\n  file: "
	for file, want := range map[string]string{
		there:                     "",
		filepath.Join(dir, "new"): "",
		filepath.Join(dir, "sub"): filepath.Join(dir, "sub") + " is not a regular file, name a file; fared renames it to sub.1 when it starts",
		filepath.Join(dir, "x/y"): "directory " + filepath.Join(dir, "x") + ": no such file or directory, create it or correct the name",
		filepath.Join(there, "y"): there + " is not a directory, correct the name",
	} {
		cfg := filepath.Join(dir, "fared.yaml")
		if err := os.WriteFile(cfg, []byte(text+file+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Load(cfg)
		if want != "" {
			want = cfg + ":9:9: record.file: " + want
		}
		if got := fmt.Sprint(err); (want == "") != (err == nil) || err != nil && got != want {
			t.Errorf("record.file %s:\n%v\nwant\n%s", file, err, want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "new")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file was created: %v", err)
	}
	if content, err := os.ReadFile(there); err != nil || string(content) != "content" {
		t.Errorf("the file holds %q, %v", content, err)
	}
}
