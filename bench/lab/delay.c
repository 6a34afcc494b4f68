/* Delays the packets that arrive at a node by their transmission time and the delay of the link.
 *
 *     delay MICROSECONDS BITS_PER_SECOND
 *
 * It replaces tc's netem, which some kernels lack. It runs inside the network namespace of the
 * node, where iptables hands every arriving packet to NFQUEUE 0. The packets stay in the kernel. This
 * program receives their lengths and releases each packet after its transmission time plus the
 * delay. The transmission time is length / rate, one packet after the other, and 0 for a rate of 0.
 * tc's token bucket at the sender sets the rate and the back pressure. The transmission time here
 * is for short messages, which the burst of the bucket would transmit in no time.
 *
 * The program also holds the namespaces of the node, which end with it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netfilter/nfnetlink_queue.h>
#include <linux/netlink.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

#define SECOND 1000000000LL /* in nanoseconds, as are all times here */
#define WAITING (1 << 16)   /* packets that may wait; the kernel drops further ones */

enum { MTU = 1500, ETHERNET_HEADER = 14, TCP_IP_HEADERS = 52 };

static struct {
    uint32_t id;
    int64_t due;
} waiting[WAITING];
static uint32_t first, last; /* waiting[first % WAITING] is the next to go */
static int64_t link_free;    /* end of the transmission of all packets so far */

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

/* A request to the kernel's queue, with a variable number of attributes. */
struct request {
    struct nlmsghdr header;
    struct nfgenmsg queue;
    char attributes[64];
};

static struct request request(int type) {
    struct request r = {.header = {.nlmsg_type = NFNL_SUBSYS_QUEUE << 8 | type,
                                   .nlmsg_flags = NLM_F_REQUEST,
                                   .nlmsg_len = NLMSG_LENGTH(sizeof(struct nfgenmsg))},
                        .queue = {.version = NFNETLINK_V0}};
    return r;
}

static void add(struct request *r, int attribute, const void *data, int length) {
    struct nlattr *a = (struct nlattr *)((char *)r + r->header.nlmsg_len);
    a->nla_type = attribute;
    a->nla_len = NLA_HDRLEN + length;
    memcpy((char *)a + NLA_HDRLEN, data, length);
    r->header.nlmsg_len += NLA_ALIGN(a->nla_len);
}

static void add_number(struct request *r, int attribute, uint32_t value) {
    value = htonl(value);
    add(r, attribute, &value, sizeof value);
}

static void deliver(int fd, struct request *r) {
    if (send(fd, r, r->header.nlmsg_len, 0) < 0) perror("delay: send");
}

static int open_queue(void) {
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_NETFILTER);
    struct sockaddr_nl address = {.nl_family = AF_NETLINK};
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address)) {
        perror("delay: the kernel has no netlink for netfilter");
        exit(1);
    }
    int size = 16 << 20, one = 1;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size);
    setsockopt(fd, SOL_NETLINK, NETLINK_NO_ENOBUFS, &one, sizeof one);

    struct nfqnl_msg_config_cmd bind_it = {.command = NFQNL_CFG_CMD_BIND, .pf = htons(AF_INET)};
    struct request r = request(NFQNL_MSG_CONFIG);
    add(&r, NFQA_CFG_CMD, &bind_it, sizeof bind_it);
    deliver(fd, &r);

    /* Only the IP header is copied, because only the length is needed. */
    struct nfqnl_msg_config_params copy = {.copy_range = htonl(20), .copy_mode = NFQNL_COPY_PACKET};
    r = request(NFQNL_MSG_CONFIG);
    add(&r, NFQA_CFG_PARAMS, &copy, sizeof copy);
    add_number(&r, NFQA_CFG_QUEUE_MAXLEN, WAITING - 1);
    deliver(fd, &r);

    /* Packets of up to 64 KB are not split, as with the offloading of a network card. */
    r = request(NFQNL_MSG_CONFIG);
    add_number(&r, NFQA_CFG_FLAGS, NFQA_CFG_F_GSO);
    add_number(&r, NFQA_CFG_MASK, NFQA_CFG_F_GSO);
    deliver(fd, &r);
    return fd;
}

/* Records a packet that has arrived. */
static void arrived(uint32_t id, uint32_t length, int64_t delay, double per_byte) {
    uint32_t frames = (length + MTU - 1) / MTU; /* each frame of a packet has headers */
    double on_wire = length + ETHERNET_HEADER * frames + TCP_IP_HEADERS * (frames - 1.0);
    int64_t start = now();
    if (link_free > start) start = link_free;
    link_free = start + (int64_t)(on_wire * per_byte);
    waiting[last % WAITING].id = id;
    waiting[last++ % WAITING].due = link_free + delay;
}

static void receive(int fd, int64_t delay, double per_byte) {
    static char buffer[8192] __attribute__((aligned(NLMSG_ALIGNTO)));
    int size;
    while ((size = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT)) > 0)
        for (struct nlmsghdr *h = (void *)buffer; NLMSG_OK(h, size); h = NLMSG_NEXT(h, size)) {
            if (h->nlmsg_type != (NFNL_SUBSYS_QUEUE << 8 | NFQNL_MSG_PACKET)) continue;
            char *at = (char *)NLMSG_DATA(h) + NLMSG_ALIGN(sizeof(struct nfgenmsg));
            char *end = (char *)h + h->nlmsg_len;
            uint32_t id = 0, length = 0;
            while (end - at >= NLA_HDRLEN) {
                struct nlattr *a = (struct nlattr *)at;
                void *data = at + NLA_HDRLEN;
                int type = a->nla_type & NLA_TYPE_MASK;
                if (type == NFQA_PACKET_HDR)
                    id = ntohl(((struct nfqnl_msg_packet_hdr *)data)->packet_id);
                else if (type == NFQA_CAP_LEN) /* only present if the packet was truncated */
                    length = ntohl(*(uint32_t *)data);
                else if (type == NFQA_PAYLOAD && !length)
                    length = a->nla_len - NLA_HDRLEN;
                at += NLA_ALIGN(a->nla_len);
            }
            arrived(id, length, delay, per_byte);
        }
}

/* Releases all packets that are due. Returns the time until the next one is due. */
static int64_t release(int fd) {
    int64_t time = now();
    uint32_t before = first;
    while (first != last && waiting[first % WAITING].due <= time) first++;
    if (first != before) { /* a batch verdict holds for all packets up to this one */
        struct nfqnl_msg_verdict_hdr accept = {htonl(NF_ACCEPT),
                                               htonl(waiting[(first - 1) % WAITING].id)};
        struct request r = request(NFQNL_MSG_VERDICT_BATCH);
        add(&r, NFQA_VERDICT_HDR, &accept, sizeof accept);
        deliver(fd, &r);
    }
    if (first == last) return SECOND;
    int64_t left = waiting[first % WAITING].due - now();
    return left > 0 ? left : 0;
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "delay MICROSECONDS BITS_PER_SECOND\n");
        return 2;
    }
    int64_t delay = (int64_t)(atof(arguments[1]) * 1000);
    double rate = atof(arguments[2]), per_byte = rate > 0 ? 8.0 * SECOND / rate : 0;

    /* Wake up in time, before the measured programs: late packets would slow the network. */
    prctl(PR_SET_TIMERSLACK, 1);
    struct sched_param priority = {.sched_priority = 50};
    if (sched_setscheduler(0, SCHED_FIFO, &priority)) perror("delay: no real-time priority");
    signal(SIGPIPE, SIG_IGN);

    int fd = open_queue();
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t left = release(fd);
        struct timespec wait = {left / SECOND, left % SECOND};
        struct pollfd queue = {.fd = fd, .events = POLLIN};
        if (ppoll(&queue, 1, &wait, NULL) > 0) receive(fd, delay, per_byte);
    }
}
