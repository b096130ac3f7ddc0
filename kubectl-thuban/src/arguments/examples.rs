//! Examples in the help of verbs, and what follows them.

pub const EXAMPLES: &str = "Examples:
  kubectl thuban status                  what works, what does not, and what to do
  kubectl thuban status --wait=300       the same, once Thuban works or after 300 s
  kubectl thuban check -o json           what may go wrong, for a program
  kubectl thuban tree red                VPC red: its networks, bouncers, dividers, pods
  kubectl thuban why web-0 db-0:5432     what keeps packets of web-0 from db-0
  kubectl thuban connectivity test       whether pods reach what they should, and nothing else
  kubectl thuban trace red/web-0         the packets of a pod, hop by hop on its node
  kubectl thuban flows -n red -f         who sends what to whom, and what was dropped
  kubectl thuban explain NetworkFull     what a reason means
  kubectl thuban sysdump                 an archive for those who help you

Exit status: 0 if all is well, 1 if something was found, 2 if something could not be looked at.";
pub const STATUS_EXAMPLES: &str = "Examples:
  kubectl thuban status
  kubectl thuban status -o wide          every object that is not well, with the remedy
  kubectl thuban status --wait           once Thuban works, after 60 s at most
  kubectl thuban status -n red           endpoints of the namespace red alone";
pub const CHECK_EXAMPLES: &str = "Examples:
  kubectl thuban check
  kubectl thuban check -o json | jq '.lines[].problems[]'";
pub const TREE_EXAMPLES: &str = "Examples:
  kubectl thuban tree
  kubectl thuban tree red
  kubectl thuban tree red -n red         with the endpoints of the namespace red alone";
pub const ENDPOINTS_EXAMPLES: &str = "Examples:
  kubectl thuban endpoints               those of the context's namespace
  kubectl thuban endpoints -A -o wide    all of them, with the messages of those that wait";
pub const WHY_EXAMPLES: &str = "Examples:
  kubectl thuban why web-0 db-0:5432               pods of the context's namespace
  kubectl thuban why red/web-0 blue/db-0           the target is in another namespace
  kubectl thuban why red/web-0 svc/shop:80         a Service of the namespace red
  kubectl thuban why red/web-0 10.0.2.4:53/udp     an address
  kubectl thuban why red/web-0 '[fd00:2::4]:443'   an IPv6 address with a port
  kubectl thuban why red/web-0 db-0:5432 --probe   the pod sends a packet, and nodes say what they do with it

The first line begins with OK, NO or UNKNOWN: exit status 0, 1 or 2. The operator answers by what it knows; without
--probe no packet is sent. You need the right to create and delete PathTraces in the source's namespace, as the role
edit has it.";
pub const CONNECTIVITY_EXAMPLES: &str = "Examples:
  kubectl thuban connectivity test";
pub const TEST_EXAMPLES: &str = "Examples:
  kubectl thuban connectivity test
  kubectl thuban connectivity test -o json       one document at the end
  kubectl thuban connectivity test --keep        pods stay, to be looked at
  kubectl thuban connectivity test --node node-a --node node-b
  kubectl thuban connectivity test --cidr 172.30.0.0/16

It makes two namespaces, and two VPCs with equal addresses. Pods there ask each other by TCP and UDP. It deletes all
that it made, also after Ctrl-C. You need the rights of a cluster administrator; no command is run in a pod.

Exit status: 0 if all checks passed, 1 if one failed, 2 if not all could be checked.";
pub const EXPLAIN_EXAMPLES: &str = "Examples:
  kubectl thuban explain NamespaceNotAllowed    a reason of a condition or an event
  kubectl thuban explain outside_vpc            a reason of `transitd counters` and `transitd trace`";
pub const TRACE_EXAMPLES: &str = "Examples:
  kubectl thuban trace web-0                 its packets, 100 of them or those of 30 s
  kubectl thuban trace red/web-0 --count 5
  kubectl thuban trace red/web-0 --follow    until Ctrl-C, for an hour at most
  kubectl thuban trace red/web-0 -o json     one JSON object for each packet

The packets are those that the programs of the pod's node see. You need the rights to get the pod and its Endpoints,
and to run commands in transitd's pods: administrators have them. Exit status: 1 if a packet was dropped.";
pub const FLOWS_EXAMPLES: &str = "Examples:
  kubectl thuban flows -n red                   the last 100 flows of the namespace red
  kubectl thuban flows -n red -f                as they are seen, until Ctrl-C
  kubectl thuban flows --pod web-0 --verdict dropped --since 600
  kubectl thuban flows --peer red/db-0 -o wide  with bytes, VPC, flags and remedies
  kubectl thuban flows -A -f -o json            one JSON object for each flow

The flows are those that thuban-observe remembers: install it by the chart's value observe.enabled=true. You need the
rights to connect to it, and to create tokens of the ServiceAccount thuban-viewer. Exit status: 1 if packets were
dropped.";
pub const TOP_EXAMPLES: &str = "Examples:
  kubectl thuban top -n red                     pods of the namespace red by bytes
  kubectl thuban top networks --watch           again each 2 s, until Ctrl-C
  kubectl thuban top reasons -A                 why packets are dropped, in all namespaces";
pub const UI_EXAMPLES: &str = "Examples:
  kubectl thuban ui -n red                      prints a URL for your browser
  kubectl thuban ui -A --open                   all namespaces, in the browser at once

It serves at 127.0.0.1 until Ctrl-C. Whoever has the URL sees what you see.";
pub const MAN_EXAMPLES: &str = "Examples:
  kubectl thuban man --dir ~/.local/share/man/man1";
pub const SYSDUMP_EXAMPLES: &str = "Examples:
  kubectl thuban sysdump                     thuban-sysdump-TIME.tar.gz in this folder
  kubectl thuban sysdump --file /tmp/a.tar.gz --node node-a --node node-b
  kubectl thuban sysdump -n red              a tenant's: what is in its namespace

The archive has no Secrets, no environment of pods and no packets' contents. It has names and addresses: look at it
before you give it away. index.txt in the archive says what is in it, and what was left out and why.";
pub const VALUES_EXAMPLES: &str = "Examples:
  kubectl thuban values > values.yaml        for helm install --values
  kubectl thuban values --env                lines of install/config.env";
pub const UNINSTALL_EXAMPLES: &str = "Examples:
  kubectl thuban uninstall
  kubectl thuban uninstall --yes             without a question
  kubectl thuban uninstall --node-script > remove-from-node.sh

All VPCs and networks are removed, and all pods that are not on host network are deleted. It can be interrupted and
repeated. Nodes are left cordoned; run the script on each node as root, then uncordon them. With Helm, run `helm
uninstall` first. Load balancers are removed before: see the page on uninstalling.";
pub const VERSION_EXAMPLES: &str = "Examples:
  kubectl thuban version
  kubectl thuban version -o yaml";
pub const COMPLETIONS_EXAMPLES: &str = "Examples:
  source <(kubectl thuban completions bash)
  kubectl thuban completions zsh > \"${fpath[1]}/_kubectl-thuban\"

The script completes the words of `kubectl-thuban`.";
