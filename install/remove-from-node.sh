#!/bin/sh
# Takes what Thuban left off a node: run as root on each node after Thuban is deleted from the cluster, or at any time on a
# node that is to have it no more. Pods that still have an interface of Thuban's lose it. It can be repeated.
# `remove-from-node.sh check` only says what is there, and fails if anything is.
# CNI_BIN_DIR and CNI_CONF_DIR: the runtime's folders. By default those that transitd has noted, which are the chart's
# values cni.binDir and cni.confDir, or else the usual ones.
# Not undone: sysctls (net.ipv4.conf.{all,NIC}.rp_filter 0, forwarding on) until the node's next start.

state=${THUBAN_STATE_DIR:-/var/lib/thuban}
noted() {
    sed -n "s|^$1=\(/.*\)|\1|p" "$state/cni-folders" 2>/dev/null
}
bin=${CNI_BIN_DIR:-$(noted bin)}
bin=${bin:-/opt/cni/bin}
conf=${CNI_CONF_DIR:-$(noted conf)}
conf=${conf:-/etc/cni/net.d}

left() {
    for file in "$conf/05-thuban.conflist" "$bin/thuban" "$state" /run/thuban /sys/fs/bpf/thuban; do
        [ -e "$file" ] && [ -z "$(empty_mount "$file")" ] && echo "file $file"
    done
    ip -o link show | sed -n 's/^[0-9]*: \(thb[0-9a-f]*\|thuban-gro\)[@:].*/link \1/p'
    for rule in 6081 6083; do
        ip rule show priority $rule | sed -n "s/^$rule:.*/IPv4 rule $rule/p"
        ip -6 rule show priority $rule 2>/dev/null | sed -n "s/^$rule:.*/IPv6 rule $rule/p"
    done
    nft list tables 2>/dev/null | sed -n 's/^table inet \(thuban\|thuban-overlay\|thuban-limits\|thuban-policy\)$/nftables table inet \1/p'
    ip -o addr show dev lo | sed -n 's/.*\(169\.254\.64\.1\/32\).*/address \1 on lo/p'
    ip route show table local type blackhole | sed -n 's/^blackhole \(169\.254\.64\.2\) .*/route \1/p'
    ip -6 route show table local type blackhole 2>/dev/null | sed -n 's/^blackhole \(100::5468:7562:6102\) .*/route \1/p'
    ip -6 -o addr show dev lo 2>/dev/null | sed -n 's/.*\(fe80::5468:7562:6101\/[0-9]*\).*/address \1 on lo/p'
}

# A folder that is a mount point can't go: empty is enough.
empty_mount() {
    if [ -d "$1" ] && grep -q " $1 " /proc/self/mounts && [ -z "$(ls -A "$1")" ]; then
        echo yes
    fi
}

if [ "$1" = check ]; then
    found=$(left)
    [ -z "$found" ] && exit 0
    echo "$found"
    exit 1
fi

# No new pod may come: without its configuration the runtime says that the node is not ready.
rm -f "$conf/05-thuban.conflist"
# Agents and transit go with their pinned links, maps with their last user.
rm -rf /sys/fs/bpf/thuban
ip -o link show | sed -n 's/^[0-9]*: \(thb[0-9a-f]*\|thuban-gro\)[@:].*/\1/p' | while read -r link; do
    ip link del "$link"
done
for rule in 6081 6083; do
    while ip rule del priority $rule 2>/dev/null; do :; done
    while ip -6 rule del priority $rule 2>/dev/null; do :; done
done
for table in thuban thuban-overlay thuban-limits thuban-policy; do
    nft delete table inet $table 2>/dev/null
done
for table in 6081 6083; do
    ip route flush table $table 2>/dev/null
    ip -6 route flush table $table 2>/dev/null
done
ip route del blackhole 169.254.64.2 table local 2>/dev/null
ip -6 route del blackhole 100::5468:7562:6102 table local 2>/dev/null
ip addr del 169.254.64.1/32 dev lo 2>/dev/null
ip -6 addr del fe80::5468:7562:6101/128 dev lo 2>/dev/null
rm -f "$bin/thuban"
for folder in /run/thuban "$state"; do
    rm -rf "$folder" 2>/dev/null || rm -rf "$folder"/* 2>/dev/null
done
found=$(left)
[ -z "$found" ] && exit 0
echo "still there: $found" >&2
exit 1
