#!/usr/bin/env bash
# Create the files of an encrypted and authenticated federation: a certificate authority
# (CA), a certificate for the server's names and addresses, and a key per node.
#
#   certificates.sh DIR --server NAME_OR_ADDRESS ... [--node NAME ...]
#
# Writes into DIR:
#   ca.crt, ca.key            created once and never replaced
#   server.crt, server.key    renewed if the names change or at most 30 days are left
#   nodes/NAME, NAME.pub      private and public key of a node; created once
#
# ca.key is needed only here: keep it off the server. A device gets ca.crt and its own
# nodes/NAME, and nothing else. Invalid input leads to exit code 2 and a one-line error.
set -euo pipefail

ca_days=3650
server_days=397        # the maximum that strict TLS clients accept
renew_before=2592000   # seconds: 30 days

fail() {
    echo "error: $1" >&2
    exit 2
}

directory="" section="" servers=() nodes=()
for argument in "$@"; do
    case $argument in
        --server | --node) section=$argument ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
        -*) fail "unknown option '$argument'; known: --server, --node" ;;
        *)
            case $section in
                --server) servers+=("$argument") ;;
                --node) nodes+=("$argument") ;;
                *)
                    [[ -z $directory ]] || fail "what is '$argument'? one DIR is allowed"
                    directory=$argument
                    ;;
            esac
            ;;
    esac
done
[[ -n $directory ]] || fail "no DIR; expected the first argument"
((${#servers[@]} + ${#nodes[@]})) || fail "nothing to make; give --server or --node"
for tool in openssl ssh-keygen; do
    command -v "$tool" >/dev/null || fail "$tool is not installed"
done

# Subject alternative names: a SuperNode checks the name or address that it connects to.
# The SuperLink starts each ServerApp as a process that connects to 127.0.0.1. Without
# this name, a run would hang in its first second.
names="DNS:localhost,IP:127.0.0.1,IP:::1"
for server in ${servers[@]+"${servers[@]}"}; do
    [[ $server != localhost && $server != 127.0.0.1 ]] || continue
    if [[ $server =~ ^[0-9]+(\.[0-9]+){3}$ || $server == *:* ]]; then
        [[ $server =~ ^[0-9a-fA-F:.]+$ ]] || fail "server '$server' is no IP address"
        names+=",IP:$server"
    else
        [[ $server =~ ^[A-Za-z0-9*]([A-Za-z0-9.-]*[A-Za-z0-9])?$ ]] ||
            fail "server '$server' must be a host name or an IP address"
        names+=",DNS:$server"
    fi
done
for node in ${nodes[@]+"${nodes[@]}"}; do
    [[ $node =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ && $node != *.pub ]] ||
        fail "node '$node' must be of letters, digits, '.', '_' and '-'"
done

# Restrict permissions from the start, so that others can never read a key.
umask 077
mkdir -p "$directory/nodes"
cd "$directory"
work=$(mktemp -d .partial.XXXXXX)
trap 'rm -rf "$work"' EXIT

if [[ -e ca.key || -e ca.crt ]]; then
    [[ -e ca.crt ]] || fail "there is ca.key in '$directory' but no ca.crt"
    openssl x509 -in ca.crt -noout 2>"$work/log" || fail "'$directory/ca.crt' is damaged"
    echo "ca.crt: kept"
else
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -sha384 \
        -days "$ca_days" -subj "/O=flwr-frl/CN=flwr-frl CA" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" \
        -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout "$work/ca.key" -out "$work/ca.crt" 2>"$work/log" ||
        fail "openssl made no CA: $(tail -n 1 "$work/log")"
    # The key is moved first, because a certificate without its key cannot sign.
    mv "$work/ca.key" ca.key
    mv "$work/ca.crt" ca.crt
    echo "ca.crt, ca.key: made, valid for $ca_days days"
fi
chmod 600 ca.key 2>/dev/null || true
chmod 644 ca.crt

# The names are stored next to the certificate, so that the next run can compare.
fits() {
    [[ -e server.key && -e server.crt && $(cat server.names 2>/dev/null) == "$names" ]] &&
        openssl x509 -in server.crt -noout -checkend "$renew_before" >/dev/null &&
        openssl verify -CAfile ca.crt server.crt >/dev/null 2>&1
}
if ((${#servers[@]})); then
    if fits; then
        echo "server.crt: kept"
    else
        [[ -e ca.key ]] || fail "no ca.key in '$directory' to sign server.crt with"
        cat >"$work/extensions" <<END
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth
subjectAltName=$names
END
        {
            openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -sha256 \
                -subj "/O=flwr-frl/CN=SuperLink" \
                -keyout "$work/server.key" -out "$work/server.csr" &&
                openssl x509 -req -in "$work/server.csr" -CA ca.crt -CAkey ca.key \
                    -set_serial "0x$(openssl rand -hex 16)" -days "$server_days" -sha384 \
                    -extfile "$work/extensions" -out "$work/server.crt"
        } 2>"$work/log" || fail "openssl made no server.crt: $(tail -n 1 "$work/log")"
        rm -f server.names
        mv "$work/server.key" server.key
        mv "$work/server.crt" server.crt
        echo "$names" >server.names
        echo "server.crt, server.key: made for $names, valid for $server_days days"
    fi
    chmod 600 server.key
    chmod 644 server.crt
fi

# Flower identifies nodes by an ECDSA key on the curve P-384.
for node in ${nodes[@]+"${nodes[@]}"}; do
    if [[ -e nodes/$node ]]; then
        echo "nodes/$node: kept"
    else
        ssh-keygen -q -t ecdsa -b 384 -N "" -C "$node" -f "$work/node"
        mv "$work/node.pub" "nodes/$node.pub"
        mv "$work/node" "nodes/$node"
        echo "nodes/$node, nodes/$node.pub: made"
    fi
    chmod 600 "nodes/$node"
    chmod 644 "nodes/$node.pub"
done
